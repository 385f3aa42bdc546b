// Package envelope is how stores without columns keep an object: its mark stands in front of
// the data, in the same bytes, so that one write replaces both.
package envelope

import (
	"bytes"
	"encoding/json"
	"errors"

	"github.com/holdfast-go/holdfast/fencing"
)

const magic = "holdfast object 1\n"

// ErrFormat says that a text is not an object, or damaged.
var ErrFormat = errors.New("not an object of holdfast, or a damaged one")

// header is what stands in front of the data, as one line of JSON.
type header struct {
	Version string        `json:"version,omitempty"` // where the store gives none
	Token   fencing.Token `json:"token"`
	Owner   string        `json:"owner,omitempty"`
	Stamp   string        `json:"stamp,omitempty"`
	Size    int           `json:"size"` // of the data, in bytes
}

// Encode returns the bytes of an object.
func Encode(o fencing.Object) ([]byte, error) {
	head, err := json.Marshal(header{o.Version, o.Claim.Token, o.Claim.Owner, o.Stamp, len(o.Data)})
	if err != nil {
		return nil, err
	}
	text := make([]byte, 0, len(magic)+len(head)+1+len(o.Data))
	return append(append(append(append(text, magic...), head...), '\n'), o.Data...), nil
}

// Decode returns the object of some bytes, which it goes on using, or ErrFormat.
func Decode(text []byte) (fencing.Object, error) {
	rest, ok := bytes.CutPrefix(text, []byte(magic))
	head, data, cut := bytes.Cut(rest, []byte("\n"))
	var h header
	if !ok || !cut || json.Unmarshal(head, &h) != nil || h.Size != len(data) {
		return fencing.Object{}, ErrFormat
	}
	claim := fencing.Claim{Token: h.Token, Owner: h.Owner}
	return fencing.Object{Data: data, Claim: claim, Stamp: h.Stamp, Version: h.Version}, nil
}
