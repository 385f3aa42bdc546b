//go:build !unix || solaris || aix

package filefence

import (
	"errors"
	"os"
)

const lockable = false

func tryLock(*os.File) (bool, error) { return false, errors.ErrUnsupported }
