// Package bus is the mesh's use of NATS JetStream: which subjects and streams
// there are, how items are published and pulled, how they are settled, and how
// replies find their gateway. Nobody else builds subjects or knows NATS.
//
// A Bus is one connection. A gateway uses
//
//	b.Send(item, done)                publish an item to its stage's queue
//	b.Withdraw(ctx, item, seq)        take it back while it waits there
//	b.Alive(ctx, stage)               ask whether anybody serves a stage
//	b.ServeReplies(gateway, handle)   receive what hosts answer
//
// and a stage host
//
//	b.EnsureQueue(ctx, settings)      create stream and consumers
//	b.Pull(settings, handle)          pull items, within a bound
//	b.Send(item or reply, done)       send on what an item became
//	d.Ack(), d.Nak(delay), d.Term()   settle the item
//	b.ServeAlive(stage, host)         answer that question
//
// # Promises
//
// Nothing is buffered while the broker is away: a send is refused at once with
// ErrDisconnected, and what was refused is never delivered later. A send whose
// acknowledgement does not come is ErrUnknown: it may have been delivered, and
// is repeated with the same message id. ErrQueueFull, ErrNoQueue, ErrNoGateway
// and ErrTooLarge say that nothing was delivered.
//
// A memory stream is gone when its broker restarts. A queue's Epoch is its
// stream's creation time and part of its consumers' names, so an item pulled
// from a queue that is gone cannot be settled by mistake in the one that
// replaced it.
//
// Handlers given to a Bus run on its subscriptions' goroutines and must not
// block on the network. All methods are safe for concurrent use.
//
// Tests use bustest, which runs a real broker in the process.
package bus
