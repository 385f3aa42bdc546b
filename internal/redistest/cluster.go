package redistest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	slotCount       = 16384
	clusterLimit    = 20 * time.Second // within which the nodes must find each other
	migrateLimit    = 5 * time.Second  // of one MIGRATE, whose source answers nothing else
	keysPerTransfer = 100
)

// ClusterSet is a cluster of masters without replicas. It is safe for concurrent use,
// with the restriction of Server; but move one slot at a time. Its processes end with
// the test.
type ClusterSet struct {
	Nodes []*Server

	t   testing.TB
	ids []string // what the nodes call themselves
}

// StartCluster starts a cluster in which each of the masters has an equal share of
// the slots, node 0 the lowest ones. It waits until all nodes serve.
func StartCluster(t testing.TB, masters int) *ClusterSet {
	t.Helper()
	if masters < 1 || masters > slotCount {
		t.Fatalf("redistest: a cluster of %d masters", masters)
	}
	c := &ClusterSet{t: t}
	for range masters {
		node := startNode(t)
		c.Nodes = append(c.Nodes, node)
		id, err := node.Admin().ClusterMyID(context.Background()).Result()
		if err != nil {
			t.Fatalf("redistest: CLUSTER MYID: %v", err)
		}
		c.ids = append(c.ids, id)
	}
	for i := range masters {
		// Without epochs of their own the nodes would have to settle who gets which.
		c.do(i, "CLUSTER", "SET-CONFIG-EPOCH", i+1)
		c.do(i, "CLUSTER", "ADDSLOTSRANGE", i*slotCount/masters, (i+1)*slotCount/masters-1)
	}
	for i := 1; i < masters; i++ {
		c.do(0, "CLUSTER", "MEET", "127.0.0.1", c.Nodes[i].port, c.Nodes[i].busPort)
	}
	for i := range c.Nodes {
		Eventually(t, clusterLimit, fmt.Sprintf("node %d serves", i), func() bool { return c.serves(i) })
	}
	return c
}

func startNode(t testing.TB) *Server {
	t.Helper()
	return start(t, dataDefaults, func(c *config) {
		c.cluster = true
		c.set("cluster-enabled", "yes")
		c.set("cluster-config-file", "nodes.conf")
		c.set("cluster-node-timeout", "5000")
		c.set("cluster-announce-ip", "127.0.0.1") // else a single node does not know its own
	})
}

// serves reports whether a node sees the whole cluster, as all others do in the end.
func (c *ClusterSet) serves(i int) bool {
	info := c.Nodes[i].Admin().ClusterInfo(context.Background()).Val()
	return strings.Contains(info, "cluster_state:ok\r\n") &&
		strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d\r\n", len(c.Nodes))) &&
		strings.Contains(info, fmt.Sprintf("cluster_size:%d\r\n", len(c.Nodes)))
}

// do runs a command on one node and fails the test on an error.
func (c *ClusterSet) do(node int, args ...any) any {
	c.t.Helper()
	v, err := c.Nodes[node].Admin().Do(context.Background(), args...).Result()
	if err != nil {
		c.t.Fatalf("redistest: %v on node %d: %v", args, node, err)
	}
	return v
}

// Client returns a new client of the cluster, closed at the end of the test. The
// options are go-redis's defaults, but for the addresses, as opts change them.
func (c *ClusterSet) Client(opts ...func(*redis.ClusterOptions)) *redis.ClusterClient {
	o := &redis.ClusterOptions{}
	for _, node := range c.Nodes {
		o.Addrs = append(o.Addrs, node.Addr())
	}
	for _, f := range opts {
		f(o)
	}
	client := redis.NewClusterClient(o)
	c.t.Cleanup(func() { _ = client.Close() })
	return client
}

// SlotOwner returns the index of the node that has the slot, according to the first
// node that runs. While a slot is being moved that is the node that it leaves.
func (c *ClusterSet) SlotOwner(slot int) int {
	c.t.Helper()
	owner, err := c.slotOwner(slot)
	if err != nil {
		c.t.Fatalf("redistest: the owner of slot %d: %v", slot, err)
	}
	return owner
}

func (c *ClusterSet) slotOwner(slot int) (int, error) {
	for i, node := range c.Nodes {
		if node.answering() {
			return c.slotOwnerBy(i, slot)
		}
	}
	return 0, errors.New("no node runs")
}

// slotOwnerBy returns the owner of a slot as one node sees it.
func (c *ClusterSet) slotOwnerBy(node, slot int) (int, error) {
	ranges, err := c.Nodes[node].Admin().ClusterSlots(context.Background()).Result()
	if err != nil {
		return 0, err
	}
	for _, r := range ranges {
		if r.Start <= slot && slot <= r.End && len(r.Nodes) > 0 {
			return c.index(r.Nodes[0].ID)
		}
	}
	return 0, errors.New("nobody has it")
}

func (c *ClusterSet) index(id string) (int, error) {
	for i := range c.ids {
		if c.ids[i] == id {
			return i, nil
		}
	}
	return 0, fmt.Errorf("a node %q that is not of the set", id)
}

// MoveSlot moves a slot with its keys to the node of index to, as resharding does
// under load: keys stay reachable, for clients that follow MOVED and ASK.
func (c *ClusterSet) MoveSlot(slot, to int) {
	c.t.Helper()
	c.BeginMove(slot, to)
	c.MoveKeys(slot, to)
	c.FinishMove(slot, to)
}

// BeginMove is the first part of MoveSlot: the slot is migrating from its owner and
// importing in the other node. The owner answers ASK for keys that it has not, and
// TRYAGAIN for several keys of which it has some.
func (c *ClusterSet) BeginMove(slot, to int) {
	c.t.Helper()
	from := c.SlotOwner(slot)
	if from == to {
		c.t.Fatalf("redistest: node %d has slot %d already", to, slot)
	}
	// The importing side first, so that it knows when the owner begins to send clients.
	c.do(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", c.ids[from])
	c.do(from, "CLUSTER", "SETSLOT", slot, "MIGRATING", c.ids[to])
}

// MoveKeys is the second part of MoveSlot: it moves the keys that the owner of the
// slot has in it. Others do not come after BeginMove.
func (c *ClusterSet) MoveKeys(slot, to int) {
	c.t.Helper()
	from := c.SlotOwner(slot)
	for {
		keys, err := c.Nodes[from].Admin().ClusterGetKeysInSlot(context.Background(), slot, keysPerTransfer).Result()
		if err != nil {
			c.t.Fatalf("redistest: CLUSTER GETKEYSINSLOT on node %d: %v", from, err)
		}
		if len(keys) == 0 {
			return
		}
		migrate := []any{"MIGRATE", "127.0.0.1", c.Nodes[to].port, "", 0, migrateLimit.Milliseconds(), "KEYS"}
		for _, key := range keys {
			migrate = append(migrate, key)
		}
		c.do(from, migrate...) // "NOKEY" if all have expired, which is as well
	}
}

// FinishMove is the last part of MoveSlot: it tells all nodes that run who has the
// slot now. It fails the test if the old owner has keys in it still.
func (c *ClusterSet) FinishMove(slot, to int) {
	c.t.Helper()
	from := c.SlotOwner(slot)
	// The old owner would refuse, but only after the new one has taken the slot.
	if keys := c.do(from, "CLUSTER", "COUNTKEYSINSLOT", slot); keys != int64(0) {
		c.t.Fatalf("redistest: node %d has %v keys in slot %d still", from, keys, slot)
	}
	// The new owner first, then the old one: in between both send clients to the new.
	order := []int{to, from}
	for i := range c.Nodes {
		if i != to && i != from && c.Nodes[i].answering() {
			order = append(order, i)
		}
	}
	for _, i := range order {
		c.do(i, "CLUSTER", "SETSLOT", slot, "NODE", c.ids[to])
	}
	// The new owner has taken a new epoch by itself. Until all know of it, another
	// move could take the same one, and both owners would claim the slot.
	Eventually(c.t, clusterLimit, fmt.Sprintf("all nodes know that node %d has slot %d", to, slot), func() bool {
		epochs := map[string]bool{}
		for i, node := range c.Nodes {
			if !node.answering() {
				continue
			}
			if owner, err := c.slotOwnerBy(i, slot); err != nil || owner != to {
				return false
			}
			_, epoch, _ := strings.Cut(node.Admin().ClusterInfo(context.Background()).Val(), "cluster_current_epoch:")
			epoch, _, _ = strings.Cut(epoch, "\r\n")
			epochs[epoch] = true
		}
		return len(epochs) == 1
	})
}
