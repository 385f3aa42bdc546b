// Package keyspace has the rules for key names: the cluster slot of a key, and
// the companion keys that must live in the same slot. It is for the packages
// of holdfast.
package keyspace

import "strings"

// Slots is the number of hash slots of a Redis Cluster.
const Slots = 16384

// Tag returns the part of key that decides its slot: what stands between the
// first "{" and the first "}" after it, if that is not empty, else the whole
// key. Source: Redis Cluster specification, "Hash tags".
func Tag(key string) string {
	if open := strings.IndexByte(key, '{'); open >= 0 {
		if n := strings.IndexByte(key[open+1:], '}'); n > 0 {
			return key[open+1 : open+1+n]
		}
	}
	return key
}

// Slot returns the cluster slot of key, CRC16(tag) mod 16384. Source: Redis
// Cluster specification, "Key distribution model".
func Slot(key string) int { return int(crc16(Tag(key))) % Slots }

// crc16 is CRC-16/XMODEM: polynomial 0x1021, initial value 0.
func crc16(s string) uint16 {
	var crc uint16
	for i := 0; i < len(s); i++ {
		crc ^= uint16(s[i]) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return crc
}

// Companion returns the name of a companion of key, in the same slot: "a{b}c"
// gets a suffix, "order:1" is wrapped ("{order:1}:fence"). It reports false for
// a key whose braces allow neither, such as "a}b" or "{}".
func Companion(key, suffix string) (string, bool) {
	if len(Tag(key)) != len(key) {
		return key + ":" + suffix, true
	}
	// Wrapped, the tag ends at the first "}": there must be none before ours.
	if key == "" || strings.IndexByte(key, '}') >= 0 {
		return "", false
	}
	return "{" + key + "}:" + suffix, true
}

// Companions are the keys that stand beside a lock, in its slot.
type Companions struct{ Queue, Waiters, Fence string }

// HasCompanions reports whether key can have companions.
func HasCompanions(key string) bool {
	return len(Tag(key)) != len(key) || key != "" && strings.IndexByte(key, '}') < 0
}

// CompanionsOf returns the companions of key, or false where Companion does. No
// two keys share a queue: "order:1" and "{order:1}", which share a fence counter
// (its tokens still grow), would hand each other's waiters the wrong lock.
func CompanionsOf(key string) (Companions, bool) {
	if !HasCompanions(key) {
		return Companions{}, false
	}
	queue, waiters, fence := ":queue", ":waiters", ":fence"
	var all string // one allocation for all
	base := len(key)
	switch tag := len(Tag(key)); tag {
	case len(key):
		base += 2
		all = "{" + key + "}" + queue + "{" + key + "}" + waiters + "{" + key + "}" + fence
	case len(key) - 2: // all of it is a tag: it looks like a key that was wrapped
		queue, waiters = ":queue{}", ":waiters{}"
		fallthrough
	default:
		all = key + queue + key + waiters + key + fence
	}
	second := base + len(queue)
	third := second + base + len(waiters)
	return Companions{all[:second], all[second:third], all[third:]}, true
}
