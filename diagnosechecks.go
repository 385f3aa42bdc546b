package holdfast

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/refusal"
)

const (
	clockTolerance = time.Second // that clocks may be apart
	clockTries     = 3
)

func (p *patient) checkVersion(context.Context) {
	version := p.info["redis_version"]
	major, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(major)
	switch {
	case err != nil:
		p.unknown("version", p.noInfo)
	case n < 5:
		p.add("version", DiagnosisBad, "Version %s. Locks need 5.0 or later: the scripts that hand them over do not run here.", version)
	case n < 7:
		p.add("version", DiagnosisWarning, "Version %s. That will do for locks on one Redis; "+
			"a majority needs 7.0 or later, or durable servers.", version)
	default:
		p.add("version", DiagnosisOK, "Version %s.", version)
	}
}

func (p *patient) checkRole(context.Context) {
	role := p.info["role"]
	switch {
	case p.info["redis_mode"] == "sentinel":
		p.add("role", DiagnosisBad, "It is a Sentinel, which keeps no keys. The client must ask it for the primary: "+
			"use redis.NewFailoverClient.")
	case role == "master":
		p.add("role", DiagnosisOK, "It is a primary.")
	case role == "slave" || role == "replica":
		p.add("role", DiagnosisBad, "It is a replica. Locks can be neither taken nor given back here, only on its primary.")
	default:
		p.unknown("role", p.noInfo)
	}
}

func (p *patient) checkLoading(context.Context) {
	switch p.info["loading"] {
	case "0":
		p.add("loading", DiagnosisOK, "Its data is loaded.")
	case "":
		p.unknown("loading", p.noInfo)
	default:
		p.add("loading", DiagnosisBad, "It is loading its data, and answers nothing until that is done. An Acquire waits for it.")
		p.noTrial = true
	}
}

func (p *patient) checkCluster(ctx context.Context) {
	if !p.cluster && p.info["cluster_enabled"] != "1" && p.info["redis_mode"] != "cluster" {
		return
	}
	if p.single {
		p.add("cluster", DiagnosisBad, "It is a member of a Cluster, and the client is not one for Clusters. "+
			"Locks whose keys live on other members are refused: use redis.NewClusterClient.")
	}
	text, err := p.c.ClusterInfo(ctx).Result()
	if err != nil {
		if _, refused := refusal.Text(err); !refused {
			p.fail(err)
			return
		}
		p.unknown("cluster", "CLUSTER INFO is refused ("+p.why(err)+")")
		return
	}
	state := map[string]string{}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		state[name] = value
	}
	switch served := state["cluster_slots_ok"]; {
	case state["cluster_state"] != "ok":
		p.add("cluster", DiagnosisBad, "The Cluster is down as this member sees it (state %q). It refuses all locks.", state["cluster_state"])
	case served != "" && served != "16384":
		p.add("cluster", DiagnosisBad, "Only %s of 16384 slots are served. Locks whose keys are in the others cannot be taken.", served)
	default:
		p.add("cluster", DiagnosisOK, "The Cluster serves all slots.")
	}
}

func (p *patient) checkMemory(ctx context.Context) {
	policy, why := p.setting(ctx, "maxmemory_policy", "maxmemory-policy")
	if why != "" {
		p.unknown("memory", why)
		return
	}
	limit, why := p.setting(ctx, "maxmemory", "maxmemory")
	switch {
	case policy == "noeviction":
		p.add("memory", DiagnosisOK, "maxmemory-policy is noeviction: no lock is evicted.")
	case why != "":
		p.add("memory", DiagnosisWarning, "maxmemory-policy is %s. It may delete locks that are held, if there is a memory limit "+
			"(not known: %s): use noeviction.", policy, why)
	case limit == "0":
		p.add("memory", DiagnosisWarning, "maxmemory-policy is %s. As soon as maxmemory is set it may delete locks that are held: "+
			"use noeviction.", policy)
	default:
		p.add("memory", DiagnosisBad, "maxmemory-policy is %s, with a limit of %s bytes. When that is reached locks that are held may be deleted: "+
			"use noeviction.", policy, limit)
	}
}

func (p *patient) checkPersistence(ctx context.Context) {
	const check = "persistence"
	aof, why := p.setting(ctx, "aof_enabled", "appendonly")
	if why != "" {
		p.unknown(check, why)
		return
	}
	if aof == "1" || aof == "yes" {
		fsync, why := p.setting(ctx, "", "appendfsync")
		switch {
		case why != "":
			p.add(check, DiagnosisWarning, "appendonly is on. How much a crash forgets is not known: %s.", why)
		case fsync == "always":
			p.add(check, DiagnosisOK, "Each write is on disk before its answer (appendfsync always). A restart forgets no lock.")
		case fsync == "everysec":
			p.add(check, DiagnosisWarning, "appendfsync is everysec. A crash of the machine forgets the locks of the last second or two, "+
				"and they can be taken twice.")
		default:
			p.add(check, DiagnosisWarning, "appendfsync is %s. A crash of the machine forgets the locks that the system has not "+
				"written yet, and they can be taken twice.", fsync)
		}
		return
	}
	switch save, why := p.setting(ctx, "", "save"); {
	case why != "":
		p.add(check, DiagnosisWarning, "appendonly is off. A restart forgets the locks since the last snapshot, if there are any: "+
			"they can be taken twice. (Not known: %s.)", why)
	case save == "none":
		p.add(check, DiagnosisWarning, "Nothing is kept on disk. A restart forgets all locks: each can be taken again "+
			"while its holder still works, until that holder's next renewal.")
	default:
		p.add(check, DiagnosisWarning, "There are only snapshots (save %s). A restart forgets the locks since the last one, "+
			"and they can be taken twice.", save)
	}
}

func (p *patient) checkUptime(context.Context) {
	seconds, err := strconv.Atoi(p.info["uptime_in_seconds"])
	if err != nil {
		p.unknown("uptime", p.noInfo)
		return
	}
	up, ttl := time.Duration(seconds)*time.Second, p.x.cfg.ttl
	if mature := ttl + p.x.cfg.driftOf(ttl) + 2*time.Second; up < mature {
		p.add("uptime", DiagnosisWarning, "It has been up for %v. In a majority it has no vote before %v, unless it is durable.",
			up, mature.Round(100*time.Millisecond))
		return
	}
	p.add("uptime", DiagnosisOK, "It has been up for %v.", up)
}

// checkClock compares the server's clock with this machine's.
func (p *patient) checkClock(ctx context.Context) {
	level, means := DiagnosisWarning, "Waiting, ClockFloor and the search for deadlocks need it."
	if p.x.cfg.floored {
		level = DiagnosisBad
	}
	var ahead time.Duration
	unsure := time.Duration(-1)
	for range clockTries {
		sent := time.Now()
		theirs, err := p.c.Time(ctx).Result()
		if half := time.Since(sent) / 2; err == nil && (unsure < 0 || half < unsure) {
			ahead, unsure = theirs.Sub(sent.Add(half)), half
		}
		if err != nil {
			if p.tried("TIME", level, means, err); !p.silent {
				p.unknown("clock", "TIME is refused")
			}
			return
		}
	}
	p.judgeClock(ahead, unsure)
}

// judgeClock says what it means that the server's clock is ahead by that much.
func (p *patient) judgeClock(ahead, unsure time.Duration) {
	apart := ahead.Abs()
	if apart <= unsure {
		p.add("clock", DiagnosisOK, "Its clock is this machine's, give or take %v.", unsure.Round(10*time.Microsecond))
		return
	}
	text := fmt.Sprintf("Its clock is %v %s this machine's, give or take %v.", apart.Round(10*time.Microsecond),
		map[bool]string{true: "ahead of", false: "behind"}[ahead > 0], unsure.Round(10*time.Microsecond))
	if apart-unsure <= clockTolerance {
		p.add("clock", DiagnosisOK, "%s", text)
		return
	}
	p.add("clock", DiagnosisWarning, "%s Leases do not mind, but tokens of ClockFloor grow over a loss of data only if "+
		"the clocks of servers are set well.", text)
}

// checkReplicas says what a failover does to locks.
func (p *patient) checkReplicas(ctx context.Context) {
	const check = "replicas"
	count, err := strconv.Atoi(p.info["connected_slaves"])
	if err != nil {
		p.unknown(check, p.noInfo)
		return
	}
	wanted := p.x.cfg.replicas
	switch {
	case count < wanted:
		p.add(check, DiagnosisBad, "Replicas connected: %d. WithReplicas wants %d, so no lock can be taken.", count, wanted)
		return
	case count == 0:
		p.add(check, DiagnosisOK, "No replica is connected. No failover can lose locks, and there are none while this server is down.")
		return
	case wanted == 0:
		p.add(check, DiagnosisWarning, "Replicas connected: %d. A failover loses the locks that the new primary has not seen yet: "+
			"WithReplicas makes that rarer.", count)
	default:
		p.add(check, DiagnosisOK, "Replicas connected: %d. WithReplicas waits for %d, so a failover loses few locks.", count, wanted)
	}
	least, why := p.setting(ctx, "", "min-replicas-to-write")
	lag, why2 := p.setting(ctx, "", "min-replicas-max-lag")
	switch {
	case p.silent:
	case why+why2 != "":
		p.unknown("min-replicas", cmp.Or(why, why2))
	case least == "0" || lag == "0":
		p.add("min-replicas", DiagnosisWarning, "min-replicas-to-write is off. A primary that is cut off goes on giving locks, "+
			"beside the one that was promoted in its place.")
	default:
		p.add("min-replicas", DiagnosisOK, "min-replicas-to-write is %s, with a lag of at most %s s. "+
			"A primary that is cut off gives no locks after that time.", least, lag)
	}
}
