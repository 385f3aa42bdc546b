package holdfast

import (
	"container/heap"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// schedule is a heap of things by a moment. Each knows its place, from 1; 0: it is
// not in the schedule.
type schedule[T any] struct {
	items []T
	at    func(T) (clock.Instant, *int)
}

func (s *schedule[T]) Len() int { return len(s.items) }

func (s *schedule[T]) Less(i, j int) bool {
	a, _ := s.at(s.items[i])
	b, _ := s.at(s.items[j])
	return a < b
}

func (s *schedule[T]) Swap(i, j int) {
	_, a := s.at(s.items[i])
	_, b := s.at(s.items[j])
	*a, *b = j+1, i+1
	s.items[i], s.items[j] = s.items[j], s.items[i]
}

func (s *schedule[T]) Push(x any) {
	k := x.(T)
	_, place := s.at(k)
	s.items = append(s.items, k)
	*place = len(s.items)
}

func (s *schedule[T]) Pop() any {
	last := len(s.items) - 1
	k := s.items[last]
	_, place := s.at(k)
	*place = 0
	var none T
	s.items[last] = none
	s.items = s.items[:last]
	return k
}

// remove takes a thing out, if it is in.
func (s *schedule[T]) remove(k T) {
	if _, place := s.at(k); *place > 0 {
		heap.Remove(s, *place-1)
	}
}

// moved puts a thing whose moment has changed, if it is in, where it belongs.
func (s *schedule[T]) moved(k T) {
	if _, place := s.at(k); *place > 0 {
		heap.Fix(s, *place-1)
	}
}

// first returns the earliest moment, or none if that is earlier.
func (s *schedule[T]) first(none clock.Instant) clock.Instant {
	if len(s.items) == 0 {
		return none
	}
	at, _ := s.at(s.items[0])
	return min(at, none)
}
