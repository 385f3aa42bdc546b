// Package lua holds the Redis scripts of holdfast, one a file, each with its
// contract in a comment at its head. It is for the library's own packages;
// the scripts and their arguments may change in any release.
package lua

import _ "embed"

var (
	//go:embed mint.lua
	mint string

	//go:embed acquire.lua
	acquire string

	// Acquire takes a free lock, or tells who holds it.
	Acquire = mint + acquire

	//go:embed queue.lua
	queue string

	//go:embed free.lua
	free string

	//go:embed release.lua
	release string

	//go:embed wait.lua
	wait string

	// Release gives a lock up if it is the caller's: hands it over to the first who
	// waits, or deletes it.
	Release = free + mint + queue + release

	// Wait takes or keeps the places of many waiters, or the lock.
	Wait = mint + queue + wait

	// Renew raises what is left of many leases, each if it is the caller's.
	//go:embed renew.lua
	Renew string

	// Note notes that the flow of a held lock waits.
	//go:embed note.lua
	Note string

	// Detach leaves a lock to whoever attaches to it.
	//go:embed detach.lua
	Detach string

	// Attach takes a lock that was left.
	//go:embed attach.lua
	Attach string

	// Describe tells more of a held lock.
	//go:embed describe.lua
	Describe string

	// Extend sets what is left of one lease, if it is the caller's.
	//go:embed extend.lua
	Extend string

	// Accept takes a lock for a proposed token, on one instance of a majority.
	//go:embed accept.lua
	Accept string

	// Keep gives a held lock back to an instance of a majority.
	//go:embed keep.lua
	Keep string

	// GiveUp gives a lock up on one instance of a majority.
	//go:embed giveup.lua
	GiveUp string

	// Floor raises the floor under the fence counters of an instance.
	//go:embed floor.lua
	Floor string
)
