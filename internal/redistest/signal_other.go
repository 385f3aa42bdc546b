//go:build !unix

package redistest

import (
	"errors"
	"os"
)

// There is nothing like SIGSTOP here; tests that need it fail.

func suspend(*os.Process) error { return errors.ErrUnsupported }

func resume(*os.Process) error { return errors.ErrUnsupported }
