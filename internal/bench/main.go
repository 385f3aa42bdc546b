// Bench compares holdfast with other lock libraries for Redis and with the bare
// commands, side by side: it starts servers and processes of its own, lets the subjects
// take turns, and prints one Markdown table of medians and spreads.
//
//	go run . [-quick] [-run regexp] [-subjects regexp] [-rounds n] [-out file]
//
// Each measurement has a fresh server and fresh processes, which are this program once
// more. What a subject does is bounded in time: one that hangs or starves is reported,
// not waited for. At the end, also after Ctrl-C, nothing is left running.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"slices"
	"sync"
	"syscall"
	"time"
)

// options are the command line.
type options struct {
	scale    scale
	run      *regexp.Regexp // workloads
	subjects *regexp.Regexp
	rounds   int // 0: those of the scale
	out      string
}

// bench is a run of the program.
type bench struct {
	options

	family   *family
	progress io.Writer
	table    *table
}

func main() {
	runChild()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := command(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// command does what the arguments say.
func command(ctx context.Context, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if supported != nil {
		return supported
	}
	if _, err := exec.LookPath("redis-server"); err != nil {
		return err
	}
	b := &bench{options: o, progress: os.Stderr}
	text, err := b.do(ctx)
	if err != nil {
		return err
	}
	if o.out != "" {
		return os.WriteFile(o.out, []byte(text), 0o644)
	}
	_, err = fmt.Print(text)
	return err
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("bench", flag.ExitOnError)
	quick := flags.Bool("quick", false, "less of everything: under a minute")
	run := flags.String("run", "", "regular expression for the workloads to run")
	names := flags.String("subjects", "", "regular expression for the subjects")
	flags.IntVar(&o.rounds, "rounds", 0, "rounds of each workload; 0: its own number")
	flags.StringVar(&o.out, "out", "", "file for the table, instead of the standard output")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	o.scale = fullScale
	if *quick {
		o.scale = quickScale
	}
	if o.run, err = regexp.Compile(*run); err != nil {
		return o, err
	}
	o.subjects, err = regexp.Compile(*names)
	return o, err
}

// chosen returns the subjects of list that the command line names.
func (o options) chosen(list []description) []description {
	return slices.DeleteFunc(slices.Clone(list), func(d description) bool { return !o.subjects.MatchString(d.name) })
}

// do runs everything and returns the text.
func (b *bench) do(ctx context.Context) (string, error) {
	b.family = newFamily()
	defer b.family.close()
	s, err := startServer(ctx, b.family)
	if err != nil {
		return "", err
	}
	version, load := s.version(ctx), loadAverage()
	s.end()
	b.table = newTable(b.chosen(subjects))
	for _, w := range b.scale.workloads() {
		if !b.options.run.MatchString(w.id) {
			continue
		}
		if b.rounds > 0 {
			w.rounds = b.rounds
		}
		if err := b.all(ctx, w); err != nil {
			return "", err
		}
	}
	return b.table.markdown(version, load), nil
}

// all runs all rounds of a workload.
func (b *bench) all(ctx context.Context, w workload) error {
	block := b.table.add(w)
	list := b.chosen(w.subjects)
	for round := range w.rounds {
		begin := time.Now()
		if w.together {
			b.atOnce(ctx, block, list)
		} else {
			for i := range list {
				b.one(ctx, block, list[(i+round)%len(list)])
			}
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		fmt.Fprintf(b.progress, "%s: round %d of %d, %.1f s\n", w.title, round+1, w.rounds, time.Since(begin).Seconds())
	}
	return nil
}

func (b *bench) one(ctx context.Context, block *block, d description) {
	if ctx.Err() != nil {
		return
	}
	for try := range b.scale.tries {
		f, remarks, err := block.measure(ctx, b, d)
		if err != nil {
			remarks = append(remarks, fmt.Sprintf("not measured (try %d of %d): %v", try+1, b.scale.tries, err))
		}
		b.table.note(block, d.name, f, remarks)
		if err == nil || ctx.Err() != nil {
			return
		}
	}
}

func (b *bench) atOnce(ctx context.Context, block *block, list []description) {
	var wg sync.WaitGroup
	for _, d := range list {
		wg.Go(func() { b.one(ctx, block, d) }) // ended by the limits of the measurement, or ctx
	}
	wg.Wait()
}
