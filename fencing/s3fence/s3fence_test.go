package s3fence

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/stretchr/testify/require"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const bucket = "bucket"

// roundTrip is a transport.
type roundTrip func(r *http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// store starts a server that speaks S3, and returns a Bucket on it and its client. through, if
// not nil, stands between the two.
func store(t *testing.T, through func(r *http.Request, next http.RoundTripper) (*http.Response, error)) (*Bucket, *s3.Client) {
	t.Helper()
	server := httptest.NewServer(gofakes3.New(s3mem.New()).Server())
	t.Cleanup(server.Close)
	transport := server.Client().Transport
	next := transport
	if through != nil {
		transport = roundTrip(func(r *http.Request) (*http.Response, error) { return through(r, next) })
	}
	client := s3.New(s3.Options{
		BaseEndpoint: aws.String(server.URL), Region: "us-east-1", UsePathStyle: true,
		Credentials: credentials.NewStaticCredentialsProvider("id", "secret", ""),
		HTTPClient:  &http.Client{Transport: transport},
	})
	_, err := client.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: aws.String(bucket)})
	require.NoError(t, err)
	b, err := New(client, bucket)
	require.NoError(t, err)
	return b, client
}

func text(s string) func([]byte) ([]byte, error) {
	return func([]byte) ([]byte, error) { return []byte(s), nil }
}

func TestObjects(t *testing.T) {
	b, _ := store(t, nil)
	ctx := t.Context()
	o, err := b.Read(ctx, "o")
	require.NoError(t, err)
	require.Zero(t, o)
	data := "line\n\x00\xff" + strings.Repeat("x", 1<<16)
	want := fencing.Object{Data: []byte(data), Claim: fencing.Claim{Token: 1<<62 + 1, Owner: "h/ä"}, Stamp: "s"}
	require.NoError(t, b.WriteIf(ctx, "o", want))
	require.ErrorIs(t, b.WriteIf(ctx, "o", want), fencing.ErrConflict)
	o, err = b.Read(ctx, "o")
	require.NoError(t, err)
	require.NotEmpty(t, o.Version)
	want.Version = o.Version
	require.Equal(t, want, o)
	o.Data, o.Stamp = nil, "t"
	require.NoError(t, b.WriteIf(ctx, "o", o))
	require.ErrorIs(t, b.WriteIf(ctx, "o", o), fencing.ErrConflict, "its version has gone")
	o, err = b.Read(ctx, "o")
	require.NoError(t, err)
	require.NoError(t, b.WriteIf(ctx, "o", o))
	require.ErrorIs(t, b.WriteIf(ctx, "o", o), fencing.ErrConflict, "also of the same bytes")
	require.ErrorContains(t, fencing.Enter(ctx, b, "bad", 1, fencing.By("a\xff")), "UTF-8")
	for _, name := range []string{"a b", "ä/ö", "x?y#z%2F", "dir/file.txt"} {
		require.NoError(t, fencing.Write(ctx, b, name, 1, text(name)), name)
		o, err := b.Read(ctx, name)
		require.NoError(t, err)
		require.Equal(t, name, string(o.Data))
	}
}

func TestStale(t *testing.T) {
	b, _ := store(t, nil)
	ctx := t.Context()
	require.NoError(t, fencing.Enter(ctx, b, "o", 2, fencing.By("b")))
	var stale *fencing.StaleError
	require.ErrorAs(t, fencing.Write(ctx, b, "o", 1, text("old")), &stale)
	require.Equal(t, fencing.StaleError{Resource: "o", Token: 1, Seen: 2}, *stale)
	require.ErrorIs(t, fencing.Write(ctx, b, "o", 2, text("other"), fencing.By("a")), fencing.ErrStale)
	require.NoError(t, fencing.Write(ctx, b, "o", 2, text("new"), fencing.By("b")))
	o, err := b.Read(ctx, "o")
	require.NoError(t, err)
	require.Equal(t, "new", string(o.Data))
}

// A new holder that enters changes no data, and yet an old holder's write, which has read
// before, comes too late: the mark is part of what the ETag is made of.
func TestEnterChangesVersion(t *testing.T) {
	b, _ := store(t, nil)
	ctx := t.Context()
	require.NoError(t, fencing.Write(ctx, b, "o", 1, text("data")))
	err := fencing.Write(ctx, b, "o", 1, func(data []byte) ([]byte, error) {
		if string(data) == "data" {
			require.NoError(t, fencing.Enter(ctx, b, "o", 2)) // while the old one computes
		}
		return []byte("late"), nil
	})
	require.ErrorIs(t, err, fencing.ErrStale)
	o, err := b.Read(ctx, "o")
	require.NoError(t, err)
	require.Equal(t, "data", string(o.Data))
}

// Writers that meet lose nothing.
func TestConcurrentWriters(t *testing.T) {
	b, _ := store(t, nil)
	const writers, each = 8, 10
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() { // ends with its writes
			for range each {
				err := fencing.Write(t.Context(), b, "n", 1, func(data []byte) ([]byte, error) {
					n, _ := strconv.Atoi(string(data))
					return strconv.AppendInt(nil, int64(n+1), 10), nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	o, err := b.Read(t.Context(), "n")
	require.NoError(t, err)
	require.Equal(t, strconv.Itoa(writers*each), string(o.Data))
}

// For any interleaving the marks of accepted writes never go down.
func TestMarksNeverGoDown(t *testing.T) {
	b, _ := store(t, nil)
	var (
		wg      sync.WaitGroup
		granted atomic.Int64
	)
	for range 6 {
		wg.Go(func() { // ends with its writes
			token := fencing.Token(granted.Add(1))
			for range 12 {
				if rand.IntN(3) == 0 {
					token = fencing.Token(granted.Add(1))
				}
				err := fencing.Write(t.Context(), b, "log", token, func(data []byte) ([]byte, error) {
					return fmt.Appendf(data, "%d\n", token), nil
				})
				if err != nil && !errors.Is(err, fencing.ErrStale) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	o, err := b.Read(t.Context(), "log")
	require.NoError(t, err)
	last := 0
	for line := range strings.Lines(string(o.Data)) {
		n, err := strconv.Atoi(strings.TrimSpace(line))
		require.NoError(t, err)
		require.GreaterOrEqual(t, n, last)
		last = n
	}
	require.Positive(t, last)
}

// A write whose answer was lost, and which the client has sent again, is made once.
func TestLostAnswer(t *testing.T) {
	var lose atomic.Int64
	b, _ := store(t, func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
		resp, err := next.RoundTrip(r)
		if err == nil && r.Method == http.MethodPut && lose.Add(-1) >= 0 {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
			return nil, io.ErrUnexpectedEOF
		}
		return resp, err
	})
	for range 3 {
		lose.Store(1)
		require.NoError(t, fencing.Write(t.Context(), b, "log", 1, func(data []byte) ([]byte, error) {
			return append(data, 'x'), nil
		}))
		require.LessOrEqual(t, lose.Load(), int64(0))
	}
	o, err := b.Read(t.Context(), "log")
	require.NoError(t, err)
	require.Equal(t, "xxx", string(o.Data))
}

func TestVerify(t *testing.T) {
	b, _ := store(t, nil)
	for range 2 {
		require.NoError(t, b.Verify(t.Context(), "probe"))
	}
	var wg sync.WaitGroup
	for range 8 { // services that start together
		wg.Go(func() { // ends with its answer
			if err := b.Verify(t.Context(), "together"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, headers := range [][]string{{"If-None-Match", "If-Match"}, {"If-None-Match"}, {"If-Match"}} {
		b, _ := store(t, func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
			for _, h := range headers {
				r.Header.Del(h)
			}
			return next.RoundTrip(r)
		})
		for range 2 {
			require.ErrorIs(t, b.Verify(t.Context(), "probe"), ErrUnconditional, headers)
		}
	}
}

// Where writes meet, S3 may answer 409.
func TestConflictOfWrites(t *testing.T) {
	var meets atomic.Int64
	b, _ := store(t, func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
		if r.Method != http.MethodPut || meets.Add(-1) < 0 {
			return next.RoundTrip(r)
		}
		body := `<Error><Code>ConditionalRequestConflict</Code><Message>met</Message></Error>`
		return &http.Response{
			StatusCode: http.StatusConflict, Body: io.NopCloser(strings.NewReader(body)), Header: http.Header{}, Request: r,
		}, nil
	})
	meets.Store(1)
	require.ErrorIs(t, b.WriteIf(t.Context(), "o", fencing.Object{}), fencing.ErrConflict)
	meets.Store(2)
	require.NoError(t, fencing.Write(t.Context(), b, "o", 1, text("data")))
}

// What a bucket answers with otherwise is neither stale nor a conflict.
func TestErrors(t *testing.T) {
	_, err := New(nil, bucket)
	require.Error(t, err)
	_, err = New((*s3.Client)(nil), bucket)
	require.Error(t, err)
	b, client := store(t, nil)
	_, err = New(client, "")
	require.Error(t, err)
	_, err = client.PutObject(t.Context(), &s3.PutObjectInput{
		Bucket: aws.String(bucket), Key: aws.String("foreign"), Body: strings.NewReader("no object"),
	})
	require.NoError(t, err)
	_, err = b.Read(t.Context(), "foreign")
	require.ErrorIs(t, err, fencing.ErrFormat)
	require.ErrorIs(t, fencing.Write(t.Context(), b, "foreign", 1, text("x")), fencing.ErrFormat)

	nowhere, err := New(client, "nowhere")
	require.NoError(t, err)
	for _, err := range []error{
		fencing.Enter(t.Context(), nowhere, "o", 1),
		nowhere.WriteIf(t.Context(), "o", fencing.Object{Version: `"x"`}),
		nowhere.Verify(t.Context(), "o"),
	} {
		require.ErrorContains(t, err, "NoSuchBucket")
		require.NotErrorIs(t, err, fencing.ErrConflict)
	}
	require.ErrorIs(t, b.WriteIf(t.Context(), "none", fencing.Object{Version: `"d41d8cd98f00b204e9800998ecf8427e"`}),
		fencing.ErrConflict, "it was deleted")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = b.Read(ctx, "o")
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, b.WriteIf(ctx, "o", fencing.Object{}), context.Canceled)
}
