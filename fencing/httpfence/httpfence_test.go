package httpfence_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/fencing/httpfence"
	"github.com/holdfast-go/holdfast/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// byPath checks all but reads; the resource is the path.
func byPath(r *http.Request) (string, bool) { return r.URL.Path, r.Method != http.MethodGet }

// serve starts a service whose handlers are behind a gate, and returns its address and a
// client that sends tokens.
func serve(t *testing.T, g *fencing.Gate, h http.HandlerFunc, rules ...fencing.Rule) (string, *http.Client) {
	t.Helper()
	if g == nil {
		var err error
		g, err = fencing.NewGate()
		require.NoError(t, err)
	}
	s := httptest.NewServer(httpfence.Middleware(g, byPath, rules...)(h))
	t.Cleanup(s.Close)
	return s.URL, &http.Client{Transport: &httpfence.Transport{Base: s.Client().Transport}}
}

func send(ctx context.Context, c *http.Client, method, url string, headers ...string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader("body"))
	if err != nil {
		return nil, err
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Add(headers[i], headers[i+1])
	}
	return c.Do(r)
}

func status(t *testing.T, ctx context.Context, c *http.Client, method, url string, headers ...string) int {
	t.Helper()
	r, err := send(ctx, c, method, url, headers...)
	require.NoError(t, err)
	require.NoError(t, r.Body.Close())
	return r.StatusCode
}

func TestTokens(t *testing.T) {
	var got fencing.Claim
	url, c := serve(t, nil, func(w http.ResponseWriter, r *http.Request) {
		got, _ = fencing.ClaimFrom(r.Context())
		_, _ = io.Copy(w, r.Body)
	})
	ctx := t.Context()
	owned := func(token fencing.Token, owner string) context.Context {
		return fencing.WithClaim(ctx, fencing.Claim{Token: token, Owner: owner})
	}
	require.Equal(t, 200, status(t, owned(5, "a"), c, "PUT", url+"/x"))
	require.EqualValues(t, 5, got.Token)
	require.NotEmpty(t, got.Owner)
	require.NotContains(t, got.Owner, "a/", "the owner value stays where it is")
	require.Equal(t, 200, status(t, owned(5, "a"), c, "PUT", url+"/x"))
	require.Equal(t, 409, status(t, owned(5, "b"), c, "PUT", url+"/x"), "the number was given twice")
	require.Equal(t, 409, status(t, owned(4, "a"), c, "PUT", url+"/x"))
	require.Equal(t, 200, status(t, owned(4, "a"), c, "PUT", url+"/y"), "another resource")
	require.Equal(t, 200, status(t, ctx, c, "GET", url+"/x"), "reads are not checked")
	require.Equal(t, 428, status(t, ctx, c, "PUT", url+"/x"))
	for _, bad := range []string{"", "0", "-1", "+6", "06", "6.0", "1e3", "x", "0x6", "6, 7", "9223372036854775808"} {
		require.Equal(t, 400, status(t, ctx, c, "PUT", url+"/x", httpfence.Header, bad), "%q", bad)
	}
	require.Equal(t, 400, status(t, ctx, c, "PUT", url+"/x", httpfence.Header, "6", httpfence.Header, "6"))
	require.Equal(t, 400, status(t, ctx, c, "PUT", url+"/x",
		httpfence.Header, "6", httpfence.OwnerHeader, "a", httpfence.OwnerHeader, "b"))
	require.Equal(t, 200, status(t, owned(6, ""), c, "PUT", url+"/x", httpfence.Header, "7"), "a header of one's own")
	require.Equal(t, 409, status(t, owned(6, ""), c, "PUT", url+"/x"))
	_, err := send(fencing.NewContext(ctx, 0), c, "PUT", url+"/x")
	require.ErrorIs(t, err, fencing.ErrNoToken)
}

// A request may be sent again, under another token: it stays as it was.
func TestRequestStays(t *testing.T) {
	url, c := serve(t, nil, func(http.ResponseWriter, *http.Request) {})
	r, err := http.NewRequestWithContext(fencing.NewContext(t.Context(), 1), "PUT", url, nil)
	require.NoError(t, err)
	resp, err := c.Do(r)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Empty(t, r.Header)
}

func TestOnce(t *testing.T) {
	url, c := serve(t, nil, func(http.ResponseWriter, *http.Request) {}, fencing.Once())
	ctx := fencing.NewContext(t.Context(), 5)
	require.Equal(t, 200, status(t, ctx, c, "PUT", url))
	require.Equal(t, 409, status(t, ctx, c, "PUT", url))
}

// The client gets the same error as from a gate of its own, and a body that it can read.
func TestErrorOf(t *testing.T) {
	url, c := serve(t, nil, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Conflict") != "" {
			http.Error(w, "a conflict of the handler's own", http.StatusConflict)
		}
	})
	ctx := t.Context()
	r, err := send(fencing.NewContext(ctx, 9), c, "PUT", url+"/x")
	require.NoError(t, err)
	require.NoError(t, httpfence.ErrorOf(r))
	require.NoError(t, r.Body.Close())

	r, err = send(fencing.NewContext(ctx, 8), c, "PUT", url+"/x")
	require.NoError(t, err)
	var stale *fencing.StaleError
	require.ErrorAs(t, httpfence.ErrorOf(r), &stale)
	require.Equal(t, fencing.StaleError{Resource: "/x", Token: 8, Seen: 9}, *stale)
	require.ErrorIs(t, httpfence.ErrorOf(r), fencing.ErrStale, "again")
	require.Equal(t, "application/problem+json", r.Header.Get("Content-Type"))
	var body map[string]any
	require.NoError(t, json.NewDecoder(r.Body).Decode(&body))
	require.NoError(t, r.Body.Close())
	require.EqualValues(t, 409, body["status"])
	require.EqualValues(t, 9, body["seen"])
	require.NotEmpty(t, body["type"])
	require.NotEmpty(t, body["title"])

	r, err = send(ctx, c, "PUT", url+"/x")
	require.NoError(t, err)
	require.ErrorIs(t, httpfence.ErrorOf(r), fencing.ErrNoToken)
	require.NoError(t, r.Body.Close())

	r, err = send(fencing.NewContext(ctx, 9), c, "PUT", url+"/x", "Conflict", "yes")
	require.NoError(t, err)
	require.Equal(t, 409, r.StatusCode)
	require.NoError(t, httpfence.ErrorOf(r))
	require.NoError(t, r.Body.Close())
}

// failing is a store that is down.
type failing struct{}

func (failing) Load(context.Context, string) (fencing.Claim, error) {
	return fencing.Claim{}, errors.New("password=secret")
}

func (failing) Raise(context.Context, string, fencing.Check) (fencing.Claim, error) {
	return fencing.Claim{}, errors.New("password=secret")
}

// What cannot be checked is not let through, and not called stale.
func TestStoreDown(t *testing.T) {
	g, err := fencing.NewGate(fencing.WithMarks(failing{}))
	require.NoError(t, err)
	url, c := serve(t, g, func(http.ResponseWriter, *http.Request) { t.Error("let through") })
	r, err := send(fencing.NewContext(t.Context(), 1), c, "PUT", url)
	require.NoError(t, err)
	require.Equal(t, 503, r.StatusCode)
	require.NoError(t, httpfence.ErrorOf(r))
	text, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	require.NoError(t, r.Body.Close())
	require.NotContains(t, string(text), "secret")
}

// A request under a newer token stops the handler of an older one, and comes after it.
func TestNewerStopsOlder(t *testing.T) {
	begun := make(chan struct{})
	var mu sync.Mutex
	var log []string
	url, c := serve(t, nil, func(w http.ResponseWriter, r *http.Request) {
		token, _ := fencing.FromContext(r.Context())
		if token == 1 {
			close(begun)
			<-r.Context().Done()
			if !errors.Is(context.Cause(r.Context()), fencing.ErrStale) {
				t.Error(context.Cause(r.Context()))
			}
		}
		mu.Lock()
		defer mu.Unlock()
		log = append(log, fmt.Sprint(token))
	})
	old := make(chan error, 1)
	go func() { // ends with the older request
		r, err := send(fencing.NewContext(t.Context(), 1), c, "PUT", url)
		if err == nil {
			err = r.Body.Close()
		}
		old <- err
	}()
	<-begun
	require.Equal(t, 200, status(t, fencing.NewContext(t.Context(), 2), c, "PUT", url))
	require.NoError(t, <-old)
	require.Equal(t, []string{"1", "2"}, log)
}

func TestNilPanics(t *testing.T) {
	require.Panics(t, func() { httpfence.Middleware(nil, byPath) })
}

// A service that keeps stock, and refuses who has lost the lock meanwhile.
func ExampleMiddleware() {
	gate, err := fencing.NewGate() // add fencing.WithMarks, and a restart forgets nothing
	if err != nil {
		return
	}
	guard := httpfence.Middleware(gate, func(r *http.Request) (string, bool) {
		return r.PathValue("sku"), true
	})
	mux := http.NewServeMux()
	mux.Handle("PUT /stock/{sku}", guard(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusNoContent) // write here, while r.Context() lasts
	})))
	server := httptest.NewServer(mux)
	defer server.Close()

	client := &http.Client{Transport: &httpfence.Transport{}}
	for _, token := range []fencing.Token{7, 8, 7} { // in real life those of lock.Context()
		ctx := fencing.NewContext(context.Background(), token)
		r, err := http.NewRequestWithContext(ctx, http.MethodPut, server.URL+"/stock/shoe", nil)
		if err != nil {
			return
		}
		resp, err := client.Do(r)
		if err != nil {
			return
		}
		fmt.Println(token, resp.StatusCode, httpfence.ErrorOf(resp))
		_ = resp.Body.Close()
	}
	client.CloseIdleConnections()
	// Output:
	// 7 204 <nil>
	// 8 204 <nil>
	// 7 409 fencing: stale token 7 for "shoe", which has seen 8
}
