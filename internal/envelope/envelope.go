// Package envelope is how stores without columns keep an object: its mark stands in front of
// the data, in the same bytes, so that one write replaces both.
package envelope

import (
	"bytes"
	"encoding/json"
	"fmt"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/fencing"
)

const magic = "holdfast object 1\n"

// header is what stands in front of the data, as one line of JSON.
type header struct {
	Version string        `json:"version"` // random: no two writes are the same bytes
	Token   fencing.Token `json:"token"`
	Owner   string        `json:"owner,omitempty"`
	Stamp   string        `json:"stamp,omitempty"`
	Size    int           `json:"size"` // of the data, in bytes
}

// Encode returns the bytes of an object. An owner must be UTF-8: JSON would make others of
// different ones the same.
func Encode(o fencing.Object) ([]byte, error) {
	if !utf8.ValidString(o.Claim.Owner) {
		return nil, fmt.Errorf("owner %q is not valid UTF-8", o.Claim.Owner)
	}
	head, err := json.Marshal(header{o.Version, o.Claim.Token, o.Claim.Owner, o.Stamp, len(o.Data)})
	if err != nil {
		return nil, err
	}
	text := make([]byte, 0, len(magic)+len(head)+1+len(o.Data))
	return append(append(append(append(text, magic...), head...), '\n'), o.Data...), nil
}

// Decode returns the object of some bytes, which it goes on using, or fencing.ErrFormat.
func Decode(text []byte) (fencing.Object, error) {
	rest, ok := bytes.CutPrefix(text, []byte(magic))
	head, data, cut := bytes.Cut(rest, []byte("\n"))
	var h header
	if !ok || !cut || json.Unmarshal(head, &h) != nil || h.Size != len(data) {
		return fencing.Object{}, fencing.ErrFormat
	}
	claim := fencing.Claim{Token: h.Token, Owner: h.Owner}
	return fencing.Object{Data: data, Claim: claim, Stamp: h.Stamp, Version: h.Version}, nil
}
