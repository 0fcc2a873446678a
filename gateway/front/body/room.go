package body

import (
	"context"
	"errors"
	"strconv"

	"github.com/stagemesh/stagemesh/mesh/fault"
)

// budgetKey is, in the context of a request, the budget that its body takes from.
type budgetKey struct{}

// Room is where the inputs of one request are made that are not in its body as they
// are: it refuses what is too much before it is there, and books the rest in the
// request's budget. It belongs to one goroutine. On a nil Room nothing is bounded.
type Room struct {
	limit int64
	// budget is nil where there is none.
	budget Budget
	ended  func() error
	// made are the bytes of inputs, and booked are all that the budget is owed.
	made, booked int64
}

// NewRoom returns a room for inputs of so many bytes together, 0 for any number. The
// context is the request's: its budget is that of Budgeted, and nothing is made any
// more when it has ended. The room has to be closed.
func NewRoom(ctx context.Context, limit int) *Room {
	budget, _ := ctx.Value(budgetKey{}).(Budget)
	return &Room{limit: int64(limit), budget: budget, ended: func() error { return ended(ctx) }}
}

// ended returns why nobody waits any more for what is made.
func ended(ctx context.Context) error {
	switch err := ctx.Err(); {
	case err == nil:
		return nil
	case errors.Is(err, context.DeadlineExceeded):
		return fault.New(fault.DeadlineExceeded, "the request's time was over before its inputs were read").Caused(err)
	default:
		return fault.New(fault.Cancelled, "the caller went away").Caused(err)
	}
}

// Make makes room for n bytes of the input whose field that is, or returns the fault
// that refuses them: they must not be allocated then.
func (r *Room) Make(field string, n int64) error {
	if r == nil {
		return nil
	}
	if r.limit > 0 && n > r.limit-r.made {
		return r.tooLarge(field, n)
	}
	if err := r.Book(n); err != nil {
		return err
	}
	r.made += n
	return nil
}

func (r *Room) tooLarge(field string, n int64) error {
	before := ""
	if r.made > 0 {
		before = " for all inputs, of which " + strconv.FormatInt(r.made, 10) + " are taken"
	}
	return fault.Newf(fault.PayloadTooLarge, "%s takes %d bytes, gateway.max_payload is %d%s", field, n, r.limit, before).
		WithViolation(field, "takes %d bytes", n).
		WithMetadata("limit_bytes", strconv.FormatInt(r.limit, 10))
}

// Book books n bytes that are no input's and are given back before, or with, the
// others. The fault is the budget's, or says that nobody waits any more.
func (r *Room) Book(n int64) error {
	if r == nil {
		return nil
	}
	if err := r.ended(); err != nil {
		return err
	}
	if r.budget != nil {
		if f := r.budget.Take(n); f != nil {
			return f
		}
	}
	r.booked += n
	return nil
}

// Give gives back what Book took.
func (r *Room) Give(n int64) {
	if r == nil {
		return
	}
	r.booked -= n
	if r.budget != nil {
		r.budget.Give(n)
	}
}

// Made returns how many bytes of inputs there is room for, all of them booked.
func (r *Room) Made() int {
	if r == nil {
		return 0
	}
	return int(r.made)
}

// Close gives all back. Nothing that was made is used after it.
func (r *Room) Close() {
	if r != nil {
		r.Give(r.booked)
	}
}
