//go:build !unix

package main

import (
	"fmt"
	"os"
)

// main refuses: it needs a system that can stop and continue processes.
func main() {
	fmt.Fprintln(os.Stderr, "http-inventory: this system has no SIGSTOP")
	os.Exit(1)
}
