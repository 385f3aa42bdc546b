package httpfence

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"github.com/holdfast-go/holdfast/fencing"
)

// The types of problems that a [Middleware] answers with (RFC 9457, section 3.1.1).
const (
	problemType = "application/problem+json"

	typeStale       = "urn:holdfast:problem:stale-fencing-token"
	typeMissing     = "urn:holdfast:problem:fencing-token-required"
	typeMalformed   = "urn:holdfast:problem:malformed-fencing-token"
	typeUnavailable = "urn:holdfast:problem:fencing-unavailable"
)

// problem is the body of a refusal.
type problem struct {
	Type     string        `json:"type"`
	Title    string        `json:"title"`
	Status   int           `json:"status"`
	Detail   string        `json:"detail,omitempty"`
	Resource string        `json:"resource,omitempty"`
	Token    fencing.Token `json:"token,omitempty"`
	Seen     fencing.Token `json:"seen,omitempty"`
}

// Middleware puts a check in front of handlers. resource tells what a request changes, and
// whether it is to be checked at all; reads usually need not be. The rules are for all
// requests. A nil gate or resource panics here.
//
// A request without a token is answered with 428, one whose token is not a positive decimal
// number with 400, a stale one with 409, and one that could not be checked, because the
// gate's store has failed or older work did not end in time, with 503; all have a
// problem+json body (RFC 9457). To enter before it reads, a client sends any checked request
// whose handler changes nothing.
//
// The handler runs in [fencing.Gate.Do]: when a newer token comes, the context of its
// request is cancelled, and the newer request waits for its end. A handler must therefore
// heed its context, and do its writes before it returns. One that stops for that answers so
// itself, with 409: else the client gets 200. The context carries the claim.
func Middleware(gate *fencing.Gate, resource func(r *http.Request) (name string, checked bool), rules ...fencing.Rule) func(http.Handler) http.Handler {
	if gate == nil || resource == nil {
		panic("httpfence: nil gate or nil function")
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			name, checked := resource(r)
			if !checked {
				next.ServeHTTP(w, r)
				return
			}
			claim, refusal := claimOf(r)
			if refusal != nil {
				refusal.write(w)
				return
			}
			all := append([]fencing.Rule{fencing.By(claim.Owner)}, rules...)
			begun := false
			err := gate.Do(r.Context(), name, claim.Token, func(ctx context.Context) error {
				begun = true
				next.ServeHTTP(w, r.WithContext(fencing.WithClaim(ctx, claim)))
				return nil
			}, all...)
			if err != nil && !begun {
				refusalOf(name, err).write(w)
			}
		})
	}
}

// claimOf reads the headers of a request.
func claimOf(r *http.Request) (fencing.Claim, *problem) {
	values := r.Header.Values(Header)
	if len(values) == 0 {
		return fencing.Claim{}, &problem{
			Type: typeMissing, Title: "A fencing token is required", Status: http.StatusPreconditionRequired,
			Detail: "send the token of the lock in the header " + Header,
		}
	}
	malformed := &problem{
		Type: typeMalformed, Title: "The fencing token is malformed", Status: http.StatusBadRequest,
		Detail: "the header " + Header + " must come once, and be a positive decimal number",
	}
	owners := r.Header.Values(OwnerHeader)
	if len(values) > 1 || len(owners) > 1 { // whichever counts, somebody else may think otherwise
		return fencing.Claim{}, malformed
	}
	n, err := strconv.ParseInt(values[0], 10, 64)
	if err != nil || n <= 0 || strconv.FormatInt(n, 10) != values[0] {
		return fencing.Claim{}, malformed
	}
	return fencing.Claim{Token: fencing.Token(n), Owner: r.Header.Get(OwnerHeader)}, nil
}

// refusalOf is the answer to a check that failed. What a store has failed with is not for
// strangers.
func refusalOf(name string, err error) *problem {
	var stale *fencing.StaleError
	if errors.As(err, &stale) {
		return &problem{
			Type: typeStale, Title: "The fencing token is stale", Status: http.StatusConflict,
			Detail: stale.Error(), Resource: name, Token: stale.Token, Seen: stale.Seen,
		}
	}
	return &problem{
		Type: typeUnavailable, Title: "The fencing token could not be checked",
		Status: http.StatusServiceUnavailable, Resource: name,
	}
}

func (p *problem) write(w http.ResponseWriter) {
	w.Header().Set("Content-Type", problemType)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(p.Status)
	_ = json.NewEncoder(w).Encode(p) // whoever has gone does not read it
}
