// Package filefence keeps objects in files that refuse writes under stale fencing tokens:
// a store for [fencing.Write] and [fencing.Enter].
//
// Each object is one file with its mark in front, so that one rename replaces both. It is
// written beside its place, synced and renamed, under a lock that the operating system lets
// go of when a process dies: whoever is killed at any moment leaves the old object or the
// new one. The folder must be on a local file system. Locks of network file systems, and
// what they do when a server is gone, differ too much.
package filefence

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/envelope"
)

const (
	lockFiles = 64  // that the objects of a folder share
	mostName  = 200 // bytes of a file name, without what is put behind it

	firstPause = time.Millisecond
	mostPause  = 20 * time.Millisecond
)

// Dir is a folder of objects. It is safe for concurrent use, also by several processes, and
// needs no closing. It has files named lock-… of its own, which must stay.
type Dir struct{ path string }

var _ fencing.Versioned = (*Dir)(nil)

// New makes a Dir of a folder, which it creates if it is not there. On systems without
// flock it returns an error that matches errors.ErrUnsupported.
func New(path string) (*Dir, error) {
	if !lockable {
		return nil, fmt.Errorf("filefence: locks on files: %w", errors.ErrUnsupported)
	}
	if path == "" {
		return nil, errors.New("filefence: empty path")
	}
	if err := os.MkdirAll(path, 0o777); err != nil {
		return nil, fmt.Errorf("filefence: %w", err)
	}
	return &Dir{path}, nil
}

// Read returns the object of a name, the zero Object if there is none.
func (d *Dir) Read(ctx context.Context, name string) (fencing.Object, error) {
	if err := ctx.Err(); err != nil {
		return fencing.Object{}, context.Cause(ctx)
	}
	file, err := d.file(name)
	if err != nil {
		return fencing.Object{}, err
	}
	return read(file)
}

// WriteIf stores an object if the version in the folder is still o.Version. Once it has
// returned nil the object outlives a crash of the machine. It waits for other writers, at
// most until ctx ends.
func (d *Dir) WriteIf(ctx context.Context, name string, o fencing.Object) (err error) {
	file, err := d.file(name)
	if err != nil {
		return err
	}
	unlock, err := d.lock(ctx, name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	now, err := read(file)
	if err != nil {
		return err
	}
	if now.Version != o.Version {
		return fmt.Errorf("filefence: %q: %w", name, fencing.ErrConflict)
	}
	o.Version = rand.Text()
	text, err := envelope.Encode(o)
	if err != nil {
		return fmt.Errorf("filefence: %q: %w", name, err)
	}
	if err := replace(file, text); err != nil {
		return fmt.Errorf("filefence: %q: %w", name, err)
	}
	return nil
}

// file returns the path of an object's file.
func (d *Dir) file(name string) (string, error) {
	escaped := url.QueryEscape(name)
	if name == "" || len(escaped) > mostName {
		return "", fmt.Errorf("filefence: a name of %d bytes: it must have between 1 and %d, escaped", len(escaped), mostName)
	}
	return filepath.Join(d.path, escaped+".object"), nil
}

// lock waits for the lock of a name. It tries again and again, because a call that waits
// in the system would not heed ctx.
func (d *Dir) lock(ctx context.Context, name string) (unlock func() error, err error) {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // it never fails
	path := filepath.Join(d.path, fmt.Sprintf("lock-%02d", h.Sum32()%lockFiles))
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return nil, fmt.Errorf("filefence: %w", err)
	}
	for pause := firstPause; ; pause = min(2*pause, mostPause) {
		if err := ctx.Err(); err != nil {
			return nil, errors.Join(context.Cause(ctx), f.Close())
		}
		switch got, err := tryLock(f); {
		case err != nil:
			return nil, errors.Join(fmt.Errorf("filefence: lock %s: %w", path, err), f.Close())
		case got:
			return f.Close, nil // which lets go of it
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

func read(file string) (fencing.Object, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return fencing.Object{}, nil
	}
	if err != nil {
		return fencing.Object{}, fmt.Errorf("filefence: %w", err)
	}
	o, err := envelope.Decode(text)
	if err == nil && o.Version == "" {
		err = fencing.ErrFormat
	}
	if err != nil {
		return fencing.Object{}, fmt.Errorf("filefence: %s: %w", file, err)
	}
	return o, nil
}

// replace writes beside the file and renames. The lock is held, so the other name is ours;
// what a process that was killed has left there is written over.
func replace(file string, text []byte) error {
	next := file + ".next"
	f, err := os.OpenFile(next, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync() // before the rename, which may reach the disk first
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(next))
	}
	if err := os.Rename(next, file); err != nil {
		return errors.Join(err, os.Remove(next))
	}
	dir, err := os.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close()) // the rename itself
}
