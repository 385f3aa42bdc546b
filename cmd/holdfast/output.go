package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"
)

// Colours, as terminals know them.
const (
	red    = "31"
	green  = "32"
	yellow = "33"
	faint  = "2"
)

// printJSON writes a value as a line.
func (i *invocation) printJSON(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(i.stdout, "%s\n", text)
	return err
}

// heading names the server that the next lines are about, if there are several.
func (i *invocation) heading(name string) {
	if !i.json && len(i.targets) > 1 {
		fmt.Fprintln(i.stdout, i.paint(faint, "== "+name))
	}
}

// terminal returns stdout if that is a terminal, else nil.
func (i *invocation) terminal() *os.File {
	if f, ok := i.stdout.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return f
	}
	return nil
}

// paint colours a text, if the reader wants that.
func (i *invocation) paint(colour, text string) string {
	if i.terminal() == nil || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

// safe makes a text from a server fit for a terminal: one that would do more there than print
// is quoted.
func safe(text string) string {
	bad := func(r rune) bool { return !unicode.IsPrint(r) }
	if text == "" || !utf8.ValidString(text) || strings.ContainsFunc(text, bad) {
		return strconv.QuoteToGraphic(text)
	}
	return text
}

// table writes rows below each other. The first is the heading.
func table(w io.Writer, rows [][]string) error {
	var b strings.Builder
	for _, line := range align(rows) {
		b.WriteString(line + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// align pads the cells of rows to columns.
func align(rows [][]string) (lines []string) {
	var widths []int
	for _, row := range rows {
		for n, cell := range row {
			if n == len(widths) {
				widths = append(widths, 0)
			}
			widths[n] = max(widths[n], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range rows {
		var b strings.Builder
		for n, cell := range row {
			b.WriteString(cell)
			if n < len(row)-1 {
				b.WriteString(strings.Repeat(" ", widths[n]-utf8.RuneCountInString(cell)+2))
			}
		}
		lines = append(lines, b.String())
	}
	return lines
}

// ttlText is a lease for readers.
func ttlText(d time.Duration) string {
	if d < 0 {
		return "no expiry"
	}
	return short(d)
}

// short rounds a duration to what matters.
func short(d time.Duration) string {
	switch {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

// millis is a duration in JSON; nil: there is none.
func millis(d time.Duration) *int64 {
	if d < 0 {
		return nil
	}
	n := d.Milliseconds()
	return &n
}
