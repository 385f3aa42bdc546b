// Package s3fence keeps objects in S3, or a store with its interface, that refuse writes under
// stale fencing tokens: a store for fencing.Write and fencing.Enter. It stands on conditional
// writes (If-Match and If-None-Match of PutObject), which S3 has since November 2024. A store
// that takes no notice of them lets every write through: call [Bucket.Verify] once.
//
// What it needs in S3 are the rights s3:GetObject, s3:PutObject, and s3:ListBucket: without the
// last S3 answers 403, and not 404, when there is no object yet.
//
// Each object has its mark in front of the data, in the same bytes, so that one write replaces
// both, and every write has another ETag. Whoever reads it without this package must skip
// the first two lines.
package s3fence

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go"

	"github.com/holdfast-go/holdfast/fencing"
	"github.com/holdfast-go/holdfast/internal/envelope"
)

// API is what is needed of a client, such as *s3.Client.
type API interface {
	GetObject(context.Context, *s3.GetObjectInput, ...func(*s3.Options)) (*s3.GetObjectOutput, error)
	PutObject(context.Context, *s3.PutObjectInput, ...func(*s3.Options)) (*s3.PutObjectOutput, error)
}

// Bucket is a bucket of objects. It is safe for concurrent use, also by several processes, and
// needs no closing. Objects are read and written as a whole, in memory.
type Bucket struct {
	api    API
	bucket string
}

var _ fencing.Versioned = (*Bucket)(nil)

// New makes a Bucket of a bucket that exists. Its errors are for bad arguments.
func New(api API, bucket string) (*Bucket, error) {
	if v := reflect.ValueOf(api); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil, errors.New("s3fence: nil client")
	}
	if bucket == "" {
		return nil, errors.New("s3fence: empty name of a bucket")
	}
	return &Bucket{api, bucket}, nil
}

// Read returns the object of a name, its key in the bucket, or the zero Object if there is
// none. An object that is not of this package is an error.
func (b *Bucket) Read(ctx context.Context, name string) (fencing.Object, error) {
	out, err := b.api.GetObject(ctx, &s3.GetObjectInput{Bucket: &b.bucket, Key: &name})
	if missing := (*types.NoSuchKey)(nil); errors.As(err, &missing) {
		return fencing.Object{}, nil
	}
	if err != nil {
		return fencing.Object{}, fmt.Errorf("s3fence: %q: %w", name, err)
	}
	text, err := io.ReadAll(out.Body)
	err = errors.Join(err, out.Body.Close())
	var o fencing.Object
	if err == nil {
		o, err = envelope.Decode(text)
	}
	if o.Version = aws.ToString(out.ETag); err == nil && o.Version == "" {
		err = errors.New("the store gives no ETag")
	}
	if err != nil {
		return fencing.Object{}, fmt.Errorf("s3fence: %q: %w", name, err)
	}
	return o, nil
}

// WriteIf stores an object if the ETag in the bucket is still o.Version. The client may send
// it again by its own rules: a copy that comes after others conflicts with them.
func (b *Bucket) WriteIf(ctx context.Context, name string, o fencing.Object) error {
	in := &s3.PutObjectInput{Bucket: &b.bucket, Key: &name}
	if o.Version == "" {
		in.IfNoneMatch = aws.String("*")
	} else {
		in.IfMatch = aws.String(o.Version)
	}
	o.Version = rand.Text() // so that no two writes have one ETag
	text, err := envelope.Encode(o)
	if err != nil {
		return fmt.Errorf("s3fence: %q: %w", name, err)
	}
	in.Body = bytes.NewReader(text)
	_, err = b.api.PutObject(ctx, in)
	switch {
	case err == nil:
		return nil
	case isConflict(err, in.IfMatch != nil):
		return fmt.Errorf("s3fence: %q: %w: %w", name, fencing.ErrConflict, err)
	}
	return fmt.Errorf("s3fence: %q: %w", name, err)
}

// isConflict reports whether a store has refused a write by its condition: 412; or 409, where
// writes have met; or 404, if there was a version to match and no object is there any more.
func isConflict(err error, matching bool) bool {
	var api smithy.APIError
	if errors.As(err, &api) && (api.ErrorCode() == "PreconditionFailed" || api.ErrorCode() == "ConditionalRequestConflict") {
		return true
	}
	var response *awshttp.ResponseError
	if !errors.As(err, &response) {
		return false
	}
	switch response.HTTPStatusCode() {
	case http.StatusPreconditionFailed:
		return true
	case http.StatusNotFound:
		return matching && api != nil && api.ErrorCode() == "NoSuchKey"
	}
	return false
}

// ErrUnconditional is what Verify returns for a store that would let stale writes through.
var ErrUnconditional = errors.New("s3fence: the store takes no notice of conditions, and would let stale writes through")

// verifyTries bounds how often Verify writes, when others do so at the same time.
const verifyTries = 100

// Verify tries out whether the store heeds conditions, by writes to an object of this name,
// which must be used for nothing else and stays. Call it when a service starts, or in a
// test, with any store but S3 itself. It returns ErrUnconditional if it does not; any other
// error says that it could not be tried out.
func (b *Bucket) Verify(ctx context.Context, name string) error {
	o := fencing.Object{Stamp: rand.Text()}
	err := b.WriteIf(ctx, name, o) // to make it, if it is not there
	if err != nil && !errors.Is(err, fencing.ErrConflict) {
		return err
	}
	var old string // a version that is not there any more
	for n := 0; old == ""; n++ {
		now, err := b.Read(ctx, name)
		if err != nil {
			return err
		}
		o := now
		o.Stamp = rand.Text()
		switch err := b.WriteIf(ctx, name, o); {
		case err == nil:
			old = now.Version
		case !errors.Is(err, fencing.ErrConflict) || n == verifyTries: // else somebody else tries it out, too
			return err
		}
	}
	for _, version := range []string{"", old} {
		o := fencing.Object{Stamp: rand.Text(), Version: version}
		switch err := b.WriteIf(ctx, name, o); {
		case err == nil:
			return ErrUnconditional
		case !errors.Is(err, fencing.ErrConflict):
			return err
		}
	}
	return nil
}
