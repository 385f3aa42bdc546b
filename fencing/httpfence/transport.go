// Package httpfence carries fencing tokens over HTTP: a [Transport] sends the token of a
// request's context, and a [Middleware] in front of a handler refuses stale ones.
//
// A token in a header is a claim, not a proof of who sends it: authenticate clients first.
// Whoever can send one of his own choice can shut all others out of a resource.
package httpfence

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/holdfast-go/holdfast/fencing"
)

const (
	// Header has the token, in decimal digits.
	Header = "Fencing-Token"

	// OwnerHeader tells apart two grants that got the same token after a counter was
	// lost. It is a digest of the owner value, which would be enough to release the lock. So
	// do not share the marks of these resources with checks that are given the value itself.
	OwnerHeader = "Fencing-Owner"
)

// mostProblem is how many bytes of a refusal's body ErrorOf reads.
const mostProblem = 64 << 10

// Transport sends requests with the token that their context carries, such as one derived
// from lock.Context(). A request whose context has none, such as that of a lock without fencing,
// or that has a header of its own, is sent as it is. It is safe for concurrent use if Base is.
type Transport struct {
	Base http.RoundTripper // nil: http.DefaultTransport
}

var _ http.RoundTripper = (*Transport)(nil)

// RoundTrip sends a request. It fails with fencing.ErrNoToken, and sends nothing, when the
// token in the context is 0 or negative.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	base := t.Base
	if base == nil {
		base = http.DefaultTransport
	}
	c, ok := fencing.ClaimFrom(r.Context())
	if !ok || r.Header[Header] != nil {
		return base.RoundTrip(r)
	}
	if c.Token <= 0 {
		err := fencing.ErrNoToken
		if r.Body != nil {
			err = errors.Join(err, r.Body.Close()) // as a RoundTripper must
		}
		return nil, err
	}
	r = r.Clone(r.Context()) // the caller's must stay as it is
	if r.Header == nil {
		r.Header = http.Header{}
	}
	r.Header.Set(Header, strconv.FormatInt(int64(c.Token), 10))
	if c.Owner != "" {
		r.Header.Set(OwnerHeader, tag(c.Owner))
	}
	return base.RoundTrip(r)
}

// tag is a name of an owner that cannot be used to release its lock.
func tag(owner string) string {
	sum := sha256.Sum256([]byte(owner))
	return base64.RawURLEncoding.EncodeToString(sum[:16])
}

// ErrorOf returns what a response of a [Middleware] refuses: a *fencing.StaleError, or an
// error that matches fencing.ErrNoToken; nil for every other response. It reads the body of
// a refusal, and leaves one that can be read again.
func ErrorOf(r *http.Response) error {
	if r.StatusCode != http.StatusConflict && r.StatusCode != http.StatusPreconditionRequired ||
		r.Header.Get("Content-Type") != problemType || r.Body == nil {
		return nil
	}
	text, err := io.ReadAll(io.LimitReader(r.Body, mostProblem))
	r.Body = &again{io.MultiReader(bytes.NewReader(text), r.Body), r.Body}
	var p problem
	if err != nil || json.Unmarshal(text, &p) != nil {
		return nil
	}
	switch p.Type {
	case typeStale:
		return &fencing.StaleError{Resource: p.Resource, Token: p.Token, Seen: p.Seen}
	case typeMissing:
		return fmt.Errorf("%w: %s", fencing.ErrNoToken, p.Detail)
	}
	return nil
}

// again reads what was read before, and closes the body.
type again struct {
	io.Reader
	io.Closer
}
