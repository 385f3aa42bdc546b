package holdfast

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/internal/refusal"
)

// grading is how an error is taken: final (or tried again) by an acquisition, by
// one on a failover client, and during a hold.
type grading struct{ acquire, failover, hold bool }

var (
	alwaysFinal = grading{true, true, true}
	neverFinal  = grading{}
)

// Texts of Redis 7.0 and, where they differ, of 6.2 and older.
var gradedReplies = map[string]grading{
	"WRONGTYPE Operation against a key holding the wrong kind of value":             alwaysFinal,
	"NOAUTH Authentication required.":                                               alwaysFinal,
	"WRONGPASS invalid username-password pair or user is disabled.":                 alwaysFinal,
	"NOPERM User worker has no permissions to run the 'evalsha' command":            alwaysFinal,
	"NOPERM this user has no permissions to run the 'set' command":                  alwaysFinal,
	"MISCONF Redis is configured to save RDB snapshots, but it's unable to persist": alwaysFinal,
	"CROSSSLOT Keys in request don't hash to the same slot":                         alwaysFinal,
	"ERR unknown command 'EVALSHA', with args beginning with: 'abc'":                alwaysFinal,
	"ERR invalid expire time in 'set' command":                                      alwaysFinal,
	"ERR value is not an integer or out of range script: 5c, on @user_script:15.":   alwaysFinal,
	"": alwaysFinal,
	"OOM command not allowed when used memory > 'maxmemory'.":                                                                                       {true, true, false},
	"OOM command not allowed when used memory > 'maxmemory'. script: 5c, on @user_s:1.":                                                             {true, true, false},
	"ERR Error running script (call to f_5c): @user_script:20: @user_script: 20: -OOM command not allowed when used memory > 'maxmemory'.":          {true, true, false},
	"READONLY You can't write against a read only replica.":                                                                                         {true, false, false},
	"READONLY You can't write against a read only replica. script: 5c, on @user_script:20.":                                                         {true, false, false},
	"ERR Error running script (call to f_5c): @user_script:20: @user_script: 20: -READONLY You can't write against a read only replica.":            {true, false, false},
	"ERR Error running script (call to f_5c): @user_script:12: @user_script: 12: WRONGTYPE Operation against a key holding the wrong kind of value": alwaysFinal,
	"BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.":                                                        neverFinal,
	"LOADING Redis is loading the dataset in memory":                                                                                                neverFinal,
	"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.":                                                              neverFinal,
	"CLUSTERDOWN Hash slot not served":                        neverFinal,
	"TRYAGAIN Multiple keys request during rehashing of slot": neverFinal,
	"ASK 7 127.0.0.1:6380":                                    neverFinal,
	"MOVED 7 127.0.0.1:6380":                                  neverFinal,
	"NOREPLICAS Not enough good replicas to write.":           neverFinal,
	"NOSCRIPT No matching script. Please use EVAL.":           neverFinal,
	"ERR max number of clients reached":                       neverFinal,
	"ERR max number of clients + cluster connections reached": neverFinal,
}

func TestServerErrorsAreGraded(t *testing.T) {
	for text, want := range gradedReplies {
		t.Run(text, func(t *testing.T) {
			requireGrading(t, refusal.Reply(text), want)
			requireGrading(t, fmt.Errorf("hook: %w", refusal.Reply(text)), want)
			requireGrading(t, errors.Join(errors.New("hook"), refusal.Reply(text)), want)
			requireGrading(t, fmt.Errorf("outer: %w", fmt.Errorf("inner: %w", refusal.Reply(text))), want)
		})
	}
}

func requireGrading(t *testing.T, err error, want grading) {
	t.Helper()
	plain, failover := &redisStore{}, &redisStore{traits: clientTraits{failover: true}}
	got := grading{isFinal(plain.wrap(err, false)), isFinal(failover.wrap(err, false)), isFinal(plain.wrap(err, true))}
	require.Equal(t, want, got)
	require.Equal(t, got.hold, isFinal(failover.wrap(err, true)), "a hold does not ask what the client is")
	require.ErrorIs(t, plain.wrap(err, false), err, "the error stays in the chain")
	require.Contains(t, plain.wrap(err, false).Error(), err.Error())
}

func TestClientErrorsAreGraded(t *testing.T) {
	s := &redisStore{}
	require.NoError(t, s.wrap(nil, false))
	for _, err := range []error{
		context.DeadlineExceeded, context.Canceled, io.EOF, io.ErrUnexpectedEOF, net.ErrClosed,
		syscall.ECONNREFUSED, syscall.ECONNRESET, redis.ErrPoolTimeout,
		&net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED},
		&noAnswerError{}, errors.New("redis: all sentinels specified in configuration are unreachable"),
		errors.New("OOM that no server has answered with"),
	} {
		for _, e := range []error{err, fmt.Errorf("hook: %w", err)} {
			require.Equal(t, e, s.wrap(e, false))
			require.False(t, isFinal(s.wrap(e, false)), "%v", e)
			require.False(t, isFinal(s.wrap(e, true)), "%v", e)
		}
	}
	for _, hold := range []bool{true, false} {
		require.True(t, isFinal(s.wrap(redis.ErrClosed, hold)))
		require.True(t, isFinal(s.wrap(fmt.Errorf("hook: %w", redis.ErrClosed), hold)))
	}
}

// What go-redis makes of a server's answer is a server's error, its typed errors
// included.
func TestGoRedisErrorsAreServerErrors(t *testing.T) {
	bubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		c := memClient(t, m, func(o *redis.Options) { o.MaxRetries = -1 })
		require.NoError(t, c.Ping(t.Context()).Err())
		for text, want := range gradedReplies {
			if text == "" {
				continue
			}
			m.SetError(text)
			err := c.Ping(t.Context()).Err()
			m.SetError("")
			require.Error(t, err)
			got, ok := refusal.Text(fmt.Errorf("hook: %w", err))
			require.True(t, ok, text)
			require.Equal(t, text, got)
			requireGrading(t, err, want)
		}
	})
}

func TestIsFinal(t *testing.T) {
	require.False(t, isFinal(nil))
	require.False(t, isFinal(errors.New("x")))
	require.True(t, isFinal(invalid("x")))
	require.True(t, isFinal(refusal.Final(errors.New("x"))))
	require.True(t, isFinal(fmt.Errorf("y: %w", refusal.Final(errors.New("x")))))
	require.True(t, isFinal(unavailable("acquire", "k", refusal.Final(errors.New("x")))))
	require.False(t, isFinal(unavailable("acquire", "k", errors.New("x"))))
}

func TestReplyErrorsInLists(t *testing.T) {
	s := &redisStore{}
	require.NoError(t, s.ownership(int64(1)))
	var lost *LostError
	require.ErrorAs(t, s.ownership(int64(0)), &lost)
	require.Equal(t, LostGone, lost.Reason)
	require.ErrorAs(t, s.ownership(int64(-1)), &lost)
	require.Equal(t, LostTaken, lost.Reason)

	err := s.ownership("READONLY You can't write against a read only replica.")
	require.False(t, isFinal(err))
	require.NotErrorIs(t, err, ErrLost)
	require.True(t, isFinal(s.ownership("NOPERM no")))
	for _, odd := range []any{nil, int64(2), 1, []any{}, true} {
		err := s.ownership(odd)
		require.ErrorContains(t, err, "unexpected answer")
		require.NotErrorIs(t, err, ErrLost)
	}
}

func TestSplit(t *testing.T) {
	require.False(t, isSplit(nil))
	require.False(t, isSplit(errors.New("MOVED 7 127.0.0.1:6380")))
	require.True(t, isSplit(errors.New("TRYAGAIN Multiple keys request during rehashing of slot")))
	require.True(t, isSplit(errors.New("CROSSSLOT Keys in request don't hash to the same slot")))
}

func TestValuesOfOthers(t *testing.T) {
	for value, want := range map[string]string{
		"": "",
		"host-1-ab/16fd2706-8baf-433b-82eb-8c7fada847da": "host-1-ab",
		"a/b":                     "a",
		"/x":                      "/x",
		"a value of another form": "a value of another form",
	} {
		require.Equal(t, want, holderOf(value))
	}
	long := make([]byte, 3*maxHolder)
	for i := range long {
		long[i] = "я"[i%2]
	}
	require.LessOrEqual(t, len(holderOf(string(long[1:]))), maxHolder)
	require.Negative(t, leftOf(-1))
	require.Positive(t, leftOf(0))
	require.EqualValues(t, 7e6, leftOf(7))
}
