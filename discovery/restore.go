package discovery

import (
	"context"
	"errors"
	"iter"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protojson"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

const (
	// retryInterval is when a failed write is retried.
	retryInterval = time.Second
	// maxRestores is how many entries are restored at a time.
	maxRestores = 16
	// retryAfter is when callers may retry.
	retryAfter = time.Second
)

// EpochOf returns the epoch in an entry, "" if there is none: a random ID that tells a table
// that was wiped from one whose entries were deleted. The bytes of an unreadable entry are
// the epoch.
func EpochOf(e Entry) string {
	epoch := &meshv1.PipelineEpoch{}
	if (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(e.Value, epoch) != nil || epoch.GetId() == "" {
		return string(e.Value)
	}
	return epoch.GetId()
}

// CreateEpoch writes a new epoch where there is none. The gateway that fills an empty table
// writes it last: one that stops before leaves a table that still counts as wiped.
func CreateEpoch(ctx context.Context, t Table, key Key) error {
	value, err := protojson.Marshal(&meshv1.PipelineEpoch{Id: uuid.NewString()})
	if err == nil {
		_, err = Create(ctx, t, key, value, 0)
	}
	return err
}

// Create writes a value, and reports whether it did: another process may be faster.
func Create(ctx context.Context, t Table, key Key, value []byte, expect Revision) (created bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	_, err = t.Put(ctx, key, value, expect)
	if errors.Is(err, ErrConflict) {
		return false, nil
	}
	return err == nil, err
}

// Restore writes entries that a wiped table lacks, several at a time, and returns how many
// it has written. Other processes may do so at the same time; the first write of a key wins.
func Restore(ctx context.Context, t Table, missing iter.Seq2[Key, []byte]) (written int, err error) {
	var total atomic.Int64
	writes, ctx := errgroup.WithContext(ctx)
	writes.SetLimit(maxRestores)
	for key, value := range missing {
		if ctx.Err() != nil {
			break
		}
		writes.Go(func() error {
			created, err := Create(ctx, t, key, value, 0)
			if created {
				total.Add(1)
			}
			return err
		})
	}
	err = writes.Wait()
	return int(total.Load()), err
}

// Classify returns an error of a change in the table as a fault.
func Classify(err error) error {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	switch {
	case errors.Is(err, ErrUnknown):
		return fault.Newf(fault.RegistryUnavailable, "it is unknown whether the change was made; ask for it again").Caused(err).WithRetryAfter(retryAfter)
	case errors.Is(err, ErrDenied):
		return fault.New(fault.PermissionDenied, "the registry rejects the gateway's credentials").Caused(err)
	case errors.Is(err, ErrConflict):
		return fault.New(fault.RevisionMismatch, "other writers keep changing the same record").Caused(err)
	case errors.Is(err, ErrInvalid):
		return fault.Newf(fault.InvalidRequest, "%w", err)
	case errors.Is(err, ErrFull):
		return fault.Newf(fault.StoreFull, "%w; nothing was changed", err).WithRetryAfter(retryAfter)
	}
	return Unavailable(err)
}

// Unavailable returns the fault of an unavailable registry.
func Unavailable(err error) *fault.Fault {
	return fault.Newf(fault.RegistryUnavailable, "%w", err).WithRetryAfter(retryAfter)
}

// NotLoaded returns the fault of a gateway that does not know the hosts, or the pipelines, yet; why
// is for operators.
func NotLoaded(what string, why error) *fault.Fault {
	return fault.Newf(fault.RegistryUnavailable, "the gateway has not loaded the %s from the mesh's registry yet", what).Caused(why).WithRetryAfter(retryAfter)
}
