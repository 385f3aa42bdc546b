package refusal

import (
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func isFinal(err error) bool {
	var f interface{ Final() bool }
	return errors.As(err, &f) && f.Final()
}

func TestGrade(t *testing.T) {
	for text, final := range map[string][3]bool{ // for an acquisition, for a hold, with failover
		"BUSY Redis is busy running a script.":                                 {},
		"LOADING Redis is loading the dataset in memory":                       {},
		"ERR max number of clients reached":                                    {},
		"ERR Error running script (call to f_1): @user_script:1: -OOM command": {true, false, true},
		"OOM command not allowed":                                              {true, false, true},
		"READONLY You can't write against a read only replica.":                {true, false, false},
		"NOAUTH Authentication required.":                                      {true, true, true},
		"WRONGTYPE Operation against a key":                                    {true, true, true},
		"BUSYGROUP is another code":                                            {true, true, true},
	} {
		err := fmt.Errorf("hook: %w", Reply(text))
		for i, graded := range []error{Grade(err, false, false), Grade(err, true, false), Grade(err, false, true)} {
			require.Equal(t, final[i], isFinal(graded), "%s, %d", text, i)
			require.ErrorIs(t, graded, err)
		}
	}
	require.NoError(t, Grade(nil, false, false))
	require.Equal(t, io.EOF, Grade(io.EOF, false, false), "the network heals")
	require.True(t, isFinal(Grade(redis.ErrClosed, true, true)))
	require.ErrorContains(t, Grade(Reply("ERR The user executing the script can't run this command"), false, false), "NOPERM")
}

func TestText(t *testing.T) {
	text, ok := Text(fmt.Errorf("hook: %w", Reply("ERR x")))
	require.True(t, ok)
	require.Equal(t, "ERR x", text)
	_, ok = Text(io.EOF)
	require.False(t, ok)
	_, ok = Text(nil)
	require.False(t, ok)
}
