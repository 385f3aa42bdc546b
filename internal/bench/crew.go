package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
)

const (
	readyLimit = 20 * time.Second      // within which children are ready
	ahead      = 20 * time.Millisecond // of the common start, so that all hear of it before
	lastWords  = 400                   // bytes of a child's stderr that are told
)

// crew is the child processes of one measurement.
type crew struct{ members []*member }

// member is a child process, seen from its parent.
type member struct {
	proc   *process
	in     io.WriteCloser
	lines  chan []byte // of its stdout; closed at the end
	stderr tail
}

// tail keeps what was written last. It is safe for concurrent use.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	t.text = t.text[max(0, len(t.text)-lastWords):]
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.text))
}

// muster starts a child for each job and waits until all are ready. The crew must be
// dismissed.
func muster(ctx context.Context, f *family, jobs ...job) (*crew, error) {
	c := &crew{}
	for _, j := range jobs {
		m, err := enlist(f, j)
		if err != nil {
			c.dismiss()
			return nil, err
		}
		c.members = append(c.members, m)
	}
	if err := c.awaitReady(ctx, readyLimit); err != nil {
		c.dismiss()
		return nil, err
	}
	return c, nil
}

func enlist(f *family, j job) (*member, error) {
	text, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	m := &member{lines: make(chan []byte, 1)}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), jobVariable+"="+string(text))
	cmd.Stderr = &m.stderr
	if m.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	// Not StdoutPipe: the end of the process would close that, with lines still in it.
	out, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd.Stdout = in
	m.proc, err = f.start(cmd)
	_ = in.Close() // the child has its own
	if err != nil {
		_ = out.Close()
		return nil, err
	}
	go m.read(out) // ended by the child's end, in the last resort by dismiss
	return m, nil
}

func (m *member) read(out *os.File) {
	defer close(m.lines)
	defer func() { _ = out.Close() }() // everything has been read
	for r := bufio.NewReader(out); ; {
		line, err := r.ReadBytes('\n')
		if err != nil {
			return
		}
		m.lines <- line // dismiss takes it, if nobody else does
	}
}

// line returns the next line of the child.
func (m *member) line(ctx context.Context, limit time.Duration) ([]byte, error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-timer.C:
		return nil, fmt.Errorf("a child process said nothing for %v", limit)
	case line, ok := <-m.lines:
		if !ok {
			return nil, fmt.Errorf("a child process ended: %s", &m.stderr)
		}
		return line, nil
	}
}

// awaitReady waits until all children have said once that they are ready.
func (c *crew) awaitReady(ctx context.Context, limit time.Duration) error {
	for _, m := range c.members {
		line, err := m.line(ctx, limit)
		if err != nil {
			return err
		}
		if string(line) != "ready\n" {
			var r report
			if json.Unmarshal(line, &r) != nil || r.Error == "" {
				r.Error = string(line)
			}
			return errors.New(r.Error)
		}
	}
	return nil
}

// start lets all children begin at one moment, which it returns.
func (c *crew) start() (int64, error) {
	t := now() + int64(ahead)
	for _, m := range c.members {
		if _, err := fmt.Fprintf(m.in, "go %d\n", t); err != nil {
			return 0, fmt.Errorf("a child process ended: %s", &m.stderr)
		}
	}
	return t, nil
}

// reports waits for what the children hand back.
func (c *crew) reports(ctx context.Context, limit time.Duration) ([]*report, error) {
	reports := make([]*report, len(c.members))
	for i, m := range c.members {
		line, err := m.line(ctx, limit)
		if err != nil {
			return nil, err
		}
		r := &report{}
		if err := json.NewDecoder(bytes.NewReader(line)).Decode(r); err != nil {
			return nil, err
		}
		if r.Error != "" {
			return nil, errors.New(r.Error)
		}
		reports[i] = r
	}
	return reports, nil
}

// dismiss ends the children that have not ended by themselves.
func (c *crew) dismiss() {
	for _, m := range c.members {
		_ = m.in.Close()
		m.proc.kill()
		for range m.lines { // lets read end
		}
	}
}
