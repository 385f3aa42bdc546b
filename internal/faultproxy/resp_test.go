package faultproxy

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

func TestReadFrame(t *testing.T) {
	tests := []struct {
		name, in, kind string
		typ            byte
	}{
		{"simple", "+OK\r\n", "", '+'},
		{"error", "-ERR no\r\n", "", '-'},
		{"integer", ":-12\r\n", "", ':'},
		{"bulk", "$5\r\na\r\nbc\r\n", "", '$'},
		{"empty bulk", "$0\r\n\r\n", "", '$'},
		{"null bulk", "$-1\r\n", "", '$'},
		{"null array", "*-1\r\n", "", '*'},
		{"empty array", "*0\r\n", "", '*'},
		{"array", "*2\r\n$3\r\nFOO\r\n:1\r\n", "foo", '*'},
		{"nested array", "*2\r\n*2\r\n:1\r\n*1\r\n+x\r\n$-1\r\n", "", '*'},
		{"null", "_\r\n", "", '_'},
		{"boolean", "#t\r\n", "", '#'},
		{"double", ",-1.5e3\r\n", "", ','},
		{"big number", "(349286349863498634986349\r\n", "", '('},
		{"bulk error", "!9\r\nERR wrong\r\n", "", '!'},
		{"verbatim", "=7\r\ntxt:abc\r\n", "", '='},
		{"map", "%2\r\n+a\r\n*1\r\n:1\r\n+b\r\n%1\r\n+c\r\n_\r\n", "", '%'},
		{"set", "~2\r\n:1\r\n:2\r\n", "", '~'},
		{"push", ">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n", "message", '>'},
		{"attribute", "|1\r\n+ttl\r\n:1\r\n*1\r\n$1\r\na\r\n", "a", '*'},
		{"inner attribute", "*2\r\n|1\r\n+x\r\n:1\r\n+a\r\n+b\r\n", "a", '*'},
		{"streamed string", "$?\r\n;2\r\nab\r\n;1\r\nc\r\n;0\r\n", "", '$'},
		{"streamed array", "*?\r\n+a\r\n:2\r\n.\r\n", "a", '*'},
		{"streamed map", "%?\r\n+a\r\n:2\r\n.\r\n", "", '%'},
		{"long", "$100000\r\n" + strings.Repeat("x", 100000) + "\r\n", "", '$'},
		{"long line", "+" + strings.Repeat("x", 10000) + "\r\n", "", '+'},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			// One byte at a time, and something behind it that must not be eaten.
			r := newRespReader(iotest.OneByteReader(strings.NewReader(tt.in + "+next\r\n")))
			f, err := r.readFrame()
			require.NoError(t, err)
			require.Equal(t, tt.in, string(f.raw))
			require.Equal(t, string(tt.typ), string(f.typ))
			require.Equal(t, tt.kind, f.kind)
			f, err = r.readFrame()
			require.NoError(t, err)
			require.Equal(t, "+next\r\n", string(f.raw))
			// Every beginning of it is an error and none of it is lost.
			cut := tt.in[:len(tt.in)-1]
			f, err = newRespReader(strings.NewReader(cut)).readFrame()
			require.Error(t, err)
			require.Equal(t, cut, string(f.raw))
		})
	}
}

func TestReadFrameRejects(t *testing.T) {
	for _, in := range []string{
		"hello\r\n", "\r\n", "$x\r\n", "$-2\r\n", "*99999999999\r\n", "$1\r\nabc\r\n",
		"*1\r\n.\r\n", "$?\r\n+a\r\n", strings.Repeat("*1\r\n", maxDepth+2),
		"+" + strings.Repeat("x", maxLine+10000),
	} {
		_, err := newRespReader(strings.NewReader(in)).readFrame()
		require.ErrorIsf(t, err, errProtocol, "%.20q", in)
	}
}

func TestReadRequest(t *testing.T) {
	in := "*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n" + "PING  hello\r\n" + "\r\n" + "*0\r\n" + "*1\r\n$4\r\nQUIT\r\n"
	r := newRespReader(iotest.OneByteReader(strings.NewReader(in)))
	var got [][]string
	var raws string
	for {
		args, raw, err := r.readRequest()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		got = append(got, args)
		raws += string(raw)
	}
	require.Equal(t, in, raws)
	require.Len(t, got, 5)
	require.Equal(t, []string{"GET", "a\r\nb"}, got[0])
	require.Equal(t, []string{"PING", "hello"}, got[1])
	require.Empty(t, got[2])
	require.Empty(t, got[3])
	require.Equal(t, []string{"QUIT"}, got[4])

	for _, bad := range []string{"*1\r\n:1\r\n", "*x\r\n", "*1\r\n$x\r\n"} {
		_, _, err := newRespReader(strings.NewReader(bad)).readRequest()
		require.ErrorIs(t, err, errProtocol, bad)
	}
	for _, cut := range []string{"*1\r\n", "*1\r\n$3\r\n", "*1\r\n$3\r\nGE"} {
		_, _, err := newRespReader(strings.NewReader(cut)).readRequest()
		require.ErrorIs(t, err, io.ErrUnexpectedEOF, cut)
	}
}
