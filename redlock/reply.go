package redlock

import (
	"strconv"
	"time"

	"github.com/holdfast-go/holdfast/internal/refusal"
)

// read takes in the answer to the request's command.
func (r *request) read() {
	c := &r.cmd
	r.code, r.codes = 0, nil
	if r.err = c.Err(); r.err != nil {
		r.err = refusal.Grade(r.err, r.kind != take, false)
		return
	}
	list, isList := c.Val().([]any)
	switch n, isInt := c.Val().(int64); {
	case r.kind == renew && isList:
		r.codes = list
	case (r.kind == set || r.kind == drop) && isInt:
		r.code = int(n)
	case r.kind.granting() && isList && len(list) > 0:
		if !r.readGrant(list) {
			r.err = errUnused
		}
	default:
		r.err = errUnused
	}
}

// readGrant reads the answer of a granting script.
func (r *request) readGrant(list []any) bool {
	code, ok := list[0].(int64)
	number := func(i int) (n int64) {
		if i < len(list) {
			switch v := list[i].(type) {
			case int64:
				n = v
			case string:
				n, _ = strconv.ParseInt(v, 10, 64)
			}
		}
		return n
	}
	switch code {
	case 1:
		r.code = codeYes
	case 2:
		r.code = codeHad
	case 0:
		r.code = codeTaken
		if len(list) > 2 {
			r.holder, _ = list[1].(string)
			if r.left = time.Duration(number(2)) * time.Millisecond; r.left == 0 {
				r.left = time.Millisecond
			}
		}
	case -1, -2:
		r.code = codeLow - int(-1-code)
		r.counter = number(1)
	default:
		return false
	}
	return ok
}
