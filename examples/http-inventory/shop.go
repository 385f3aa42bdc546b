//go:build unix

package main

import (
	"context"
	"fmt"
	"net/http"
	"sync"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/fencing/httpfence"
)

// shop is the service.
type shop struct {
	mu    sync.Mutex
	stock map[string]int
}

func newShop() *shop { return &shop{stock: map[string]int{"shoe": 1}} }

// handler serves the shop. With fenced it checks the tokens of requests that change something.
func (s *shop) handler(fenced bool) (http.Handler, error) {
	gate, err := fencing.NewGate() // with fencing.WithMarks it forgets nothing in a restart
	if err != nil {
		return nil, err
	}
	guard := func(h http.Handler) http.Handler { return h }
	if fenced {
		guard = httpfence.Middleware(gate, func(r *http.Request) (string, bool) { return r.PathValue("sku"), true })
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /stock/{sku}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, s.left(r.PathValue("sku")))
	})
	// A new holder enters before it reads: from here on the service refuses older ones.
	mux.Handle("POST /stock/{sku}/enter", guard(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
	})))
	mux.Handle("POST /stock/{sku}/order", guard(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if r.Context().Err() != nil { // a newer holder has come
			http.Error(w, context.Cause(r.Context()).Error(), http.StatusConflict)
			return
		}
		s.stock[r.PathValue("sku")]--
		w.WriteHeader(http.StatusNoContent)
	})))
	return mux, nil
}

func (s *shop) left(sku string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stock[sku]
}
