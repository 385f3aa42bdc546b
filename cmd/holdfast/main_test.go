package main

import (
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/holdfast-go/holdfast/internal/redistest"
)

// Scripts find the program on their PATH. Tests on a terminal start it as a child.
func TestMain(m *testing.M) {
	redistest.RunChild(map[string]func(){"holdfast": main})
	testscript.Main(m, map[string]func(){"holdfast": main})
}
