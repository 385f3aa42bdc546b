package faultproxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Limits of the parser. They are those of Redis or larger; they only keep a
// broken peer from making the proxy allocate without end.
const (
	maxLine     = 1 << 20
	maxBulk     = 512 << 20
	maxElements = 1 << 20
	maxDepth    = 64
)

// errProtocol is wrapped by every error that says the bytes are not RESP, as
// opposed to errors of the connection.
var errProtocol = errors.New("faultproxy: not valid RESP")

// respReader takes RESP messages off a stream and keeps their exact bytes, so
// that they can be passed on unchanged. Not safe for concurrent use.
type respReader struct {
	br  *bufio.Reader
	raw []byte
}

func newRespReader(r io.Reader) *respReader {
	return &respReader{br: bufio.NewReader(r)}
}

// frame is one complete message of a server.
type frame struct {
	raw []byte
	// typ is the type byte of the message, with attributes skipped.
	typ byte
	// kind is the text of the first element of an array or a push, which tells
	// the messages of pub/sub apart. Empty where there is none.
	kind string
}

// readRequest reads one command. Empty commands (a blank line, "*0"), to which
// no server replies, come back with no args.
func (r *respReader) readRequest() (args []string, raw []byte, err error) {
	r.raw = nil
	line, err := r.line()
	if err != nil {
		return nil, nil, err
	}
	if len(line) == 0 || line[0] != '*' {
		// An inline command. Quoting is not undone: the bytes go on as they are,
		// the words are only looked at.
		return strings.Fields(string(line)), r.raw, nil
	}
	n, err := length(line[1:], maxElements)
	if err != nil {
		return nil, nil, err
	}
	for range n {
		line, err := r.line()
		if err != nil {
			return nil, nil, unexpectedEOF(err)
		}
		if len(line) == 0 || line[0] != '$' {
			return nil, nil, fmt.Errorf("%w: request element %q is no bulk string", errProtocol, line)
		}
		size, err := length(line[1:], maxBulk)
		if err != nil {
			return nil, nil, err
		}
		body, err := r.body(max(size, 0))
		if err != nil {
			return nil, nil, unexpectedEOF(err)
		}
		args = append(args, string(body))
	}
	return args, r.raw, nil
}

// readFrame reads one message of a server. With an error it returns the bytes
// read up to it, so that the client can be shown the same broken message.
func (r *respReader) readFrame() (frame, error) {
	r.raw = nil
	typ, text, err := r.value(0)
	f := frame{raw: r.raw, typ: typ}
	if err != nil {
		return f, err
	}
	if typ == '*' || typ == '>' {
		f.kind = strings.ToLower(string(text))
	}
	return f, nil
}

// value reads one value with everything nested in it. The text is that of the
// value itself or, if it is an aggregate, that of a string that comes first.
func (r *respReader) value(depth int) (typ byte, text []byte, err error) {
	if depth > maxDepth {
		return 0, nil, fmt.Errorf("%w: nested too deep", errProtocol)
	}
	for {
		line, err := r.line()
		if err != nil {
			return 0, nil, err
		}
		if len(line) == 0 {
			return 0, nil, fmt.Errorf("%w: empty line", errProtocol)
		}
		typ, rest := line[0], line[1:]
		switch typ {
		case '+', '-', ':', '_', '#', ',', '(':
			return typ, rest, nil
		case '$', '!', '=':
			text, err = r.bulk(rest)
			return typ, text, err
		case '*', '~', '>':
			text, err = r.aggregate(rest, 1, depth)
			return typ, text, err
		case '%':
			text, err = r.aggregate(rest, 2, depth)
			return typ, text, err
		case '|':
			// Attributes stand before the value they belong to.
			if _, err = r.aggregate(rest, 2, depth); err != nil {
				return typ, nil, err
			}
		case '.':
			return typ, nil, nil // the end of an aggregate of unknown length
		default:
			return typ, nil, fmt.Errorf("%w: unknown type %q", errProtocol, typ)
		}
	}
}

// bulk reads what follows the length of a bulk string, which is "?" for a
// string that comes in chunks.
func (r *respReader) bulk(size []byte) ([]byte, error) {
	if string(size) != "?" {
		n, err := length(size, maxBulk)
		if err != nil || n < 0 {
			return nil, err
		}
		return r.body(n)
	}
	var text []byte
	for {
		line, err := r.line()
		if err != nil {
			return nil, err
		}
		if len(line) == 0 || line[0] != ';' {
			return nil, fmt.Errorf("%w: %q is no chunk", errProtocol, line)
		}
		n, err := length(line[1:], maxBulk)
		if err != nil || n <= 0 {
			return text, err
		}
		chunk, err := r.body(n)
		if err != nil {
			return nil, err
		}
		text = append(text, chunk...)
	}
}

// aggregate reads the elements of an array, set, push or map; per is the number
// of values to one element. It returns the first value if it is a string.
func (r *respReader) aggregate(size []byte, per, depth int) (first []byte, err error) {
	streamed := string(size) == "?"
	n := 0
	if !streamed {
		if n, err = length(size, maxElements); err != nil {
			return nil, err
		}
	}
	for i := 0; streamed || i < n*per; i++ {
		typ, text, err := r.value(depth + 1)
		if err != nil {
			return nil, err
		}
		if typ == '.' {
			if !streamed {
				return nil, fmt.Errorf("%w: end of stream inside an aggregate of known length", errProtocol)
			}
			break
		}
		if i == 0 && (typ == '$' || typ == '+') {
			first = text
		}
	}
	return first, nil
}

// line reads to the end of a line and returns it without the line break.
func (r *respReader) line() ([]byte, error) {
	start := len(r.raw)
	for {
		part, err := r.br.ReadSlice('\n')
		r.raw = append(r.raw, part...)
		if err == nil {
			break
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
		if len(r.raw)-start > maxLine {
			return nil, fmt.Errorf("%w: line too long", errProtocol)
		}
	}
	line := r.raw[start : len(r.raw)-1]
	if n := len(line); n > 0 && line[n-1] == '\r' {
		line = line[:n-1]
	}
	return line, nil
}

// body reads n bytes and the line break after them. It reads in pieces, so that
// a length that is a lie does not cost its memory.
func (r *respReader) body(n int) ([]byte, error) {
	const piece = 64 << 10
	start := len(r.raw)
	for left := n + 2; left > 0; {
		at, want := len(r.raw), min(left, piece)
		r.raw = append(r.raw, make([]byte, want)...)
		got, err := io.ReadFull(r.br, r.raw[at:])
		r.raw = r.raw[:at+got]
		if err != nil {
			return nil, err
		}
		left -= want
	}
	if tail := r.raw[start+n:]; tail[0] != '\r' || tail[1] != '\n' {
		return nil, fmt.Errorf("%w: string of %d bytes does not end there", errProtocol, n)
	}
	return r.raw[start : start+n], nil
}

func length(digits []byte, limit int) (int, error) {
	n, err := strconv.Atoi(string(digits))
	if err != nil || n < -1 || n > limit {
		return 0, fmt.Errorf("%w: bad length %q", errProtocol, digits)
	}
	return n, nil
}

// unexpectedEOF keeps an end in the middle of a message from looking like an
// end between two of them.
func unexpectedEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
