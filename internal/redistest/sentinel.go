package redistest

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	masterName     = "holdfast"
	sentinelCount  = 3
	sentinelQuorum = 2
	discoveryLimit = 20 * time.Second
)

// SentinelSet is a primary with one replica, watched by three Sentinels of which two
// must agree. It is safe for concurrent use, with the restriction of Server. Its
// processes end with the test.
type SentinelSet struct {
	// Primary and Replica are what they were at first; a failover does not change
	// the fields.
	Primary, Replica *Server
	// Sentinels are servers without keys: of the methods of Server those about the
	// process are for them.
	Sentinels []*Server
	// MasterName is what the Sentinels call the primary.
	MasterName string

	t testing.TB
}

// StartSentinel starts a set in which everybody knows everybody, so that a failover
// would work. The Sentinels see a primary as down after 500 ms.
func StartSentinel(t testing.TB) *SentinelSet {
	t.Helper()
	s := &SentinelSet{t: t, MasterName: masterName}
	s.Primary = Start(t)
	s.Replica = Start(t, ReplicaOf(s.Primary))
	Eventually(t, startLimit, "the replica is in sync", func() bool {
		info := s.Replica.Admin().Info(context.Background(), "replication").Val()
		return strings.Contains(info, "master_link_status:up")
	})
	for range sentinelCount {
		s.Sentinels = append(s.Sentinels, s.startSentinel())
	}
	for i, sentinel := range s.Sentinels {
		c := s.ask(sentinel)
		Eventually(t, discoveryLimit, fmt.Sprintf("sentinel %d knows the others", i), func() bool { return s.knowsAll(c) })
	}
	return s
}

func (s *SentinelSet) startSentinel() *Server {
	s.t.Helper()
	server := start(s.t, func(c *config) {
		c.sentinel = true
		c.set("sentinel", fmt.Sprintf("monitor %s 127.0.0.1 %d %d", masterName, s.Primary.port, sentinelQuorum))
		c.set("sentinel", "down-after-milliseconds "+masterName+" 500")
		c.set("sentinel", "failover-timeout "+masterName+" 3000")
	})
	// Sentinels find each other and the replica by messages with periods of 2 s and
	// 10 s, and do nothing for 30 s after a pause of 2 s, which a busy machine has.
	// A version that cannot be told otherwise is slower, no more.
	for _, setting := range [][2]string{{"PING-PERIOD", "300"}, {"PUBLISH-PERIOD", "200"}, {"INFO-PERIOD", "500"}, {"TILT-PERIOD", "1000"}} {
		_ = server.Admin().Do(context.Background(), "SENTINEL", "DEBUG", setting[0], setting[1]).Err()
	}
	return server
}

// ask returns a client of one Sentinel, closed at the end of the test.
func (s *SentinelSet) ask(sentinel *Server) *redis.SentinelClient {
	c := redis.NewSentinelClient(&redis.Options{Addr: sentinel.Addr()})
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// knowsAll reports whether the Sentinel of c could take part in a failover: it knows
// the others, and the replica as one that is in sync.
func (s *SentinelSet) knowsAll(c *redis.SentinelClient) bool {
	ctx := context.Background()
	master := c.Master(ctx, s.MasterName).Val()
	if master["flags"] != "master" || master["num-other-sentinels"] != strconv.Itoa(sentinelCount-1) {
		return false
	}
	replicas := c.Replicas(ctx, s.MasterName).Val()
	if len(replicas) != 1 || replicas[0]["flags"] != "slave" || replicas[0]["master-link-status"] != "ok" {
		return false
	}
	return c.CkQuorum(ctx, s.MasterName).Err() == nil
}

// SentinelAddrs returns host and port of each Sentinel.
func (s *SentinelSet) SentinelAddrs() []string {
	addrs := make([]string, len(s.Sentinels))
	for i, sentinel := range s.Sentinels {
		addrs[i] = sentinel.Addr()
	}
	return addrs
}

// Client returns a new client that follows failovers, closed at the end of the test.
// The options are go-redis's defaults, but for the addresses and the name, as opts
// change them.
func (s *SentinelSet) Client(opts ...func(*redis.FailoverOptions)) *redis.Client {
	o := &redis.FailoverOptions{MasterName: s.MasterName, SentinelAddrs: s.SentinelAddrs()}
	for _, f := range opts {
		f(o)
	}
	c := redis.NewFailoverClient(o)
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// WaitFailover waits until all Sentinels that run name another master than the first
// Primary, and that one takes the role. It fails the test after within.
func (s *SentinelSet) WaitFailover(within time.Duration) {
	s.t.Helper()
	clients := map[*Server]*redis.SentinelClient{}
	for _, sentinel := range s.Sentinels {
		clients[sentinel] = s.ask(sentinel)
	}
	Eventually(s.t, within, "a failover", func() bool {
		asked := 0
		for sentinel, c := range clients {
			if !sentinel.answering() {
				continue
			}
			asked++
			if s.masterOf(c) != s.Replica {
				return false
			}
		}
		return asked > 0 && s.Replica.answering() && s.leads(s.Replica)
	})
}

// masterOf returns the server that the Sentinel of c names, nil if it is none.
func (s *SentinelSet) masterOf(c *redis.SentinelClient) *Server {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	addr := c.GetMasterAddrByName(ctx, s.MasterName).Val()
	if len(addr) != 2 {
		return nil
	}
	for _, server := range []*Server{s.Primary, s.Replica} {
		if net.JoinHostPort(addr[0], addr[1]) == server.Addr() {
			return server
		}
	}
	return nil
}

func (s *SentinelSet) leads(server *Server) bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	return strings.Contains(server.Admin().Info(ctx, "replication").Val(), "role:master")
}
