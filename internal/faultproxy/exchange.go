package faultproxy

import "time"

// exchange is one request with what is to happen to it and its reply.
type exchange struct {
	args []string
	raw  []byte

	act    Action
	handle *Handle         // nil without a rule
	gate   <-chan struct{} // what a held request or reply waits for
	due    time.Time       // when a delayed request may go on

	// answers is how many messages of the server still belong to this request.
	// It is set when the request is forwarded.
	answers int
	// answered says that the first of them has come.
	answered bool
}

// local says that the proxy itself answers and the server is not asked.
func (ex *exchange) local() bool { return ex.act.kind == actRefuse }

// delivery is something on its way to the client.
type delivery struct {
	raw  []byte
	push bool // answers no request, so losing it shifts nothing

	gate <-chan struct{}
	due  time.Time

	drop  bool // nothing is written
	close bool // the connection is closed instead

	serverGone bool // not a message: the server has ended the connection
}

// localDelivery is the answer to a request that the server does not see.
func (ex *exchange) localDelivery(slow time.Duration) delivery {
	return delivery{raw: ex.act.reply, due: time.Now().Add(slow)}
}

// replyDelivery applies the fault of ex to one message that answers it. The
// fault fires once, however many messages answer the request.
func (ex *exchange) replyDelivery(raw []byte, slow time.Duration) delivery {
	first := !ex.answered
	ex.answered = true
	d := delivery{raw: raw, due: time.Now().Add(slow)}
	switch ex.act.kind {
	case actDropReply:
		d.drop = true
	case actDropReplyAndClose:
		d.close = true
	case actReplace:
		d.raw = ex.act.reply
		d.drop = !first
	case actDelayReply:
		d.due = d.due.Add(ex.act.delay)
	case actHoldReply:
		d.gate = ex.gate
	}
	if first && ex.handle != nil && !ex.act.firesOnRequest() && ex.act.kind != actDuplicate {
		ex.handle.fire()
	}
	return d
}

// twin is the second copy of a duplicated request: the server sees it as a
// request of its own, the client never hears of it. The fault has happened when
// the twin is answered.
func (ex *exchange) twin() *exchange {
	return &exchange{args: ex.args, raw: ex.raw, act: DropReply(), handle: ex.handle}
}
