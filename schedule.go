package holdfast

import "github.com/holdfast-go/holdfast/internal/clock"

// schedule is a heap of locks by a moment. Each lock knows its place, from 1.
type schedule struct {
	locks []*Lock
	at    func(*Lock) (clock.Instant, *int)
}

func (s *schedule) Len() int { return len(s.locks) }

func (s *schedule) Less(i, j int) bool {
	a, _ := s.at(s.locks[i])
	b, _ := s.at(s.locks[j])
	return a < b
}

func (s *schedule) Swap(i, j int) {
	_, a := s.at(s.locks[i])
	_, b := s.at(s.locks[j])
	*a, *b = j+1, i+1
	s.locks[i], s.locks[j] = s.locks[j], s.locks[i]
}

func (s *schedule) Push(x any) {
	k := x.(*Lock)
	_, place := s.at(k)
	s.locks = append(s.locks, k)
	*place = len(s.locks)
}

func (s *schedule) Pop() any {
	last := len(s.locks) - 1
	k := s.locks[last]
	_, place := s.at(k)
	*place = 0
	s.locks[last] = nil
	s.locks = s.locks[:last]
	return k
}
