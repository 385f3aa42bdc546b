package faultproxy

import (
	"slices"
	"strings"
	"time"
)

type actionKind int

const (
	actNone actionKind = iota
	actDropReply
	actDropReplyAndClose
	actRefuse  // answered by the proxy, the server does not see the request
	actReplace // executed by the server, answered by the proxy
	actDelayReply
	actDelayRequest
	actHang
	actHoldRequest
	actHoldReply
	actDuplicate
	actCut
)

// Action is what a [Rule] does to the commands it matches. Make one with the
// functions of this package; the zero Action is not valid. An Action is a value
// without state and may be used in several rules.
type Action struct {
	kind  actionKind
	reply []byte
	delay time.Duration
}

// DropReply lets the request pass and execute, and swallows its reply, and only
// that: later replies on the connection are still delivered, so a client that
// has more than one request in flight takes them for the wrong requests. To
// imitate a network that has gone quiet use [HoldReply] or [Proxy.DropReplies].
func DropReply() Action { return Action{kind: actDropReply} }

// DropReplyAndClose lets the request execute and closes the client's connection
// where the reply would have been delivered.
func DropReplyAndClose() Action { return Action{kind: actDropReplyAndClose} }

// Refuse answers with the error text in the server's place. The server does not
// see the request. The text begins with the error code, as in
// "MISCONF Redis is configured to ...", without the leading dash.
func Refuse(text string) Action { return Action{kind: actRefuse, reply: ErrorReply(text)} }

// Error is [Refuse] under the name that reads better with an error code.
func Error(text string) Action { return Refuse(text) }

// ReplyError lets the server execute the request and gives the client the error
// text instead of the reply.
func ReplyError(text string) Action { return Action{kind: actReplace, reply: ErrorReply(text)} }

// Raw answers with exactly these bytes, valid RESP or not. The server does not
// see the request. The bytes are copied.
func Raw(reply []byte) Action { return Action{kind: actRefuse, reply: slices.Clone(reply)} }

// RawInstead lets the server execute the request and gives the client exactly
// these bytes instead of the reply. The bytes are copied.
func RawInstead(reply []byte) Action { return Action{kind: actReplace, reply: slices.Clone(reply)} }

// Delay delivers the reply d after it came from the server. Later replies on
// the same connection wait behind it; other connections do not.
func Delay(d time.Duration) Action { return Action{kind: actDelayReply, delay: d} }

// DelayRequest forwards the request d after it came from the client, also if
// the client has closed its connection in the meantime. Later requests on the
// same connection wait behind it; other connections do not.
func DelayRequest(d time.Duration) Action { return Action{kind: actDelayRequest, delay: d} }

// Hang reads the request and neither forwards nor answers it, and from then on
// does the same to everything that comes on this connection, as behind a server
// that got stuck. Replies to earlier requests are delivered. The connection
// stays open until the client or the proxy closes it.
func Hang() Action { return Action{kind: actHang} }

// HoldRequest keeps the request, and what follows on the connection, until
// [Handle.Release], then forwards it, also if the client has closed its
// connection in the meantime.
func HoldRequest() Action { return Action{kind: actHoldRequest} }

// HoldReply lets the request execute and keeps the reply, and what follows on
// the connection, until [Handle.Release].
func HoldReply() Action { return Action{kind: actHoldReply} }

// Duplicate sends the request to the server twice and delivers the first reply.
func Duplicate() Action { return Action{kind: actDuplicate} }

// Cut closes the client's connection at once. The request is not forwarded and
// replies that are still under way to this client are lost.
func Cut() Action { return Action{kind: actCut} }

// firesOnRequest says whether the fault counts when the request is read, rather
// than when the reply has come from the server.
func (a Action) firesOnRequest() bool {
	switch a.kind {
	case actRefuse, actDelayRequest, actHang, actHoldRequest, actCut:
		return true
	}
	return false
}

// oneLine keeps a text that goes into a simple string or an error from ending
// the line early, which would shift every later reply.
func oneLine(text string) string {
	return strings.NewReplacer("\r", " ", "\n", " ").Replace(text)
}
