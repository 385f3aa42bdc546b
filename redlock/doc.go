// Package redlock takes a lock on a majority of independent Redis instances, so that it
// outlives the loss of any minority of them. New returns a holdfast.Locker: locks,
// contexts, renewal, errors and options are those of package holdfast; only the votes
// are counted here.
//
// The algorithm is Redlock (redis.io, "Distributed Locks with Redis"), with what its
// critics have asked for: validity counts from before the first request and is checked by
// the Locker until the very end; an instance that came back without its data has no vote
// until every lease that it may have forgotten has ended; and WithFencing gives tokens
// that grow whatever the clocks do, for a resource that refuses stale ones.
//
// What it does not do: it cannot stop a paused process between its last check and its
// write (only the resource can, by the token), and it relies on clock rates that differ
// by no more than the drift (holdfast.WithDrift). Instances must be independent: no
// replicas of each other, no failover among them, other machines, other power.
package redlock
