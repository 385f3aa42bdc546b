package faultproxy

import "strings"

// In pub/sub the rule "one reply to one request" does not hold: SUBSCRIBE is
// confirmed once for every channel, in RESP3 by pushes only, and messages come
// without a request. This file knows the exceptions.

// subscriptions follows what one connection has subscribed to, which is needed
// to know how many confirmations an UNSUBSCRIBE without arguments has.
type subscriptions struct {
	// used says that the connection has ever subscribed. Until then an array
	// that begins with "message" is an ordinary reply.
	used bool
	// sets are the channels by kind of subscription: "", "p" or "s".
	sets map[string]map[string]struct{}
}

// pubsubName returns the name of a command in lower case if it is one of
// (P|S)(UN)SUBSCRIBE, else "".
func pubsubName(args []string) string {
	switch name := strings.ToLower(args[0]); name {
	case "subscribe", "psubscribe", "ssubscribe", "unsubscribe", "punsubscribe", "sunsubscribe":
		return name
	}
	return ""
}

// sent takes note of a command that goes to the server and returns how many
// messages answer it.
func (s *subscriptions) sent(args []string) int {
	name := pubsubName(args)
	if name == "" {
		if strings.EqualFold(args[0], "RESET") {
			s.sets = nil
		}
		return 1
	}
	stem := strings.TrimSuffix(name, "subscribe") // "", "p", "s", "un", "pun" or "sun"
	kind, leaves := strings.CutSuffix(stem, "un")
	if s.sets == nil {
		s.sets = make(map[string]map[string]struct{})
	}
	if s.sets[kind] == nil {
		s.sets[kind] = make(map[string]struct{})
	}
	set, channels := s.sets[kind], args[1:]
	if !leaves {
		s.used = true
		for _, c := range channels {
			set[c] = struct{}{}
		}
		// Without channels it is an error, which is one reply.
		return max(1, len(channels))
	}
	if len(channels) == 0 {
		n := len(set)
		clear(set)
		return max(1, n)
	}
	for _, c := range channels {
		delete(set, c)
	}
	return len(channels)
}

// answers says whether f is the reply, or one of the replies, to the request ex
// and not a message that came on its own.
func (s *subscriptions) answers(f frame, ex *exchange) bool {
	outOfBand := f.typ == '>'
	if f.typ == '*' && s.used {
		switch f.kind {
		case "message", "pmessage", "smessage",
			"subscribe", "psubscribe", "ssubscribe",
			"unsubscribe", "punsubscribe", "sunsubscribe":
			outOfBand = true
		}
	}
	if !outOfBand {
		return true
	}
	// Confirmations look like messages but answer the command of their name.
	return f.kind != "" && f.kind == pubsubName(ex.args)
}
