// Package redisfence guards values in Redis by fencing tokens: a write with a token lower
// than the highest that its key has seen is refused, in one atomic step with the write.
//
//	f, err := redisfence.New(client)
//	...
//	err = f.Enter(ctx, "total:1", lock.Token(), fencing.By(lock.Owner()))
//	total := client.Get(ctx, "total:1") // after Enter: nobody older writes any more
//	...
//	err = f.Set(ctx, "total:1", newTotal, 0, lock.Token(), fencing.By(lock.Owner()))
//
// A lock is a key, too: a value on the same server must not have its name, or it overwrites
// the lock. Take locks with a prefix of their own, by holdfast.WithPrefix("lock:").
//
// Enter before you read. Without it an old holder may still write between the read and
// the first write of the new one, and that write is lost.
//
// # Marks
//
// The highest token and its owner are the mark of a key: a hash beside it, in the same
// cluster slot. That of "total:1" is "{total:1}:mark", that of "a{b}c" is "a{b}c:mark",
// and that of "{total:1}" is "{total:1}:mark{}", so that no two keys share one. A mark has
// no TTL, and it stays when the value expires or is deleted, else an old holder could
// write the value again. Delete a mark only when no holder of an old token can be left.
//
// The guard is as good as the memory of the server. A failover may lose the last marks
// together with the last values, FLUSHALL and an eviction policy of allkeys-* lose any;
// and who writes past this package, by a plain SET, is not checked at all.
//
// # Errors
//
// A refused token is a [*fencing.StaleError], and nothing was written. Any other error is
// the client's or the server's, and never matches fencing.ErrStale. With an error that the
// server answers, such as WRONGTYPE, the value is as it was; but the claim may have
// entered, and with fencing.Once its token is used up then. While a cluster moves a slot,
// keys that are new or half moved get TRYAGAIN, and nothing was done. Without an answer
// nobody can know whether the write has run, or may yet run.
//
// So writes, and all that is asked with fencing.Once, are sent once: go-redis's MaxRetries
// does not apply to them. A second copy could append twice, could undo a later write of
// the same holder, or be refused by the first copy. Whoever repeats a call by himself
// takes that upon himself; a write of the same token is not told from its copy.
package redisfence
