package redlock

// count is where one question stands that was put to all instances. What it decides
// depends on nothing else.
//
// Invariant: a majority is one of all configured instances, whether or not they can be
// reached. Two majorities share an instance.
type count struct {
	of, yes, no, faults int
}

// needed is the least number of votes that is a majority of n.
func needed(n int) int { return n/2 + 1 }

// won says that a majority has agreed.
func (c count) won() bool { return c.yes >= needed(c.of) }

// refused says that so many have refused that no majority can agree.
func (c count) refused() bool { return c.no > c.of-needed(c.of) }

// impossible says that no majority can agree, for whatever reasons.
func (c count) impossible() bool { return c.no+c.faults > c.of-needed(c.of) }

// complete says that all have answered.
func (c count) complete() bool { return c.yes+c.no+c.faults == c.of }

// vote is what one instance says.
type vote uint8

const (
	pending vote = iota
	yes
	no
	fault // no answer, or none that counts
)

// add counts a vote.
func (c *count) add(v vote) {
	switch v {
	case yes:
		c.yes++
	case no:
		c.no++
	case fault:
		c.faults++
	}
}
