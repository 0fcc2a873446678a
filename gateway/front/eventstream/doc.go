// Package eventstream writes an answer as server-sent events, text/event-stream,
// one JSON document in each: as they come, to a caller who may stop reading, and
// with a comment where nothing comes for a while.
//
//	out := eventstream.New(body.PatientWriter(w, body.Patience), 0)
//	err := out.Run(r.Context(), func(ctx context.Context) error {
//		... out.Send(eventstream.Event{ID: 1, Name: "chunk", Data: document}) ...
//	})
//	switch {
//	case err == nil:
//	case out.Begun(): // the status has left: tell it in an event
//	default: // an ordinary answer, with its own status
//	}
//
// # What leaves when
//
// The status and the headers leave with the first event, so that a failure before
// it is still an answer of its own. Every event is sent at once. While Run works
// and nothing was sent for the silence, a comment is sent, ": ping", which readers
// pass over: proxies cut off what says nothing. It begins the answer too.
//
// # Failures
//
// A caller that takes nothing, or is gone, makes Send fail, and every Send after
// it. Where it is the comment that cannot be sent, the context
// that Run gave ends.
//
// # Concurrency
//
// Run has one goroutine beside the function that it runs, which has ended when Run
// returns. All else is for one goroutine at a time. A Stream belongs to one
// request.
package eventstream
