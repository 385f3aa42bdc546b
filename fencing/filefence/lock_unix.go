//go:build unix && !solaris && !aix

package filefence

import (
	"errors"
	"os"
	"syscall"
)

const lockable = true

// tryLock takes the lock of an open file, which ends with it: it belongs to the open file
// and not to the process, so that it also excludes other goroutines.
func tryLock(f *os.File) (bool, error) {
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case err == nil:
			return true, nil
		case errors.Is(err, syscall.EWOULDBLOCK):
			return false, nil
		case !errors.Is(err, syscall.EINTR):
			return false, err
		}
	}
}
