// Package wire reads and writes protobuf's wire format for the messages that
// every hop pays for, without the generated ones in between: straight from a
// message's bytes into the mesh's own values, and back.
//
// To read, walk the fields of a Message:
//
//	for m.Next() {
//		switch m.Tag {
//		case nameTag:
//			out.Name = m.Text()
//		}
//	}
//	return m.Err()
//
// A field that no case names is skipped, and so is one whose wire type is
// another than the case's, as protobuf has it. What is there twice is the
// caller's to handle as protobuf does: a scalar's last word stands, messages are
// merged, which is to read the second into the same value. The first error ends
// the walk.
//
// To write, tell a Writer the fields one by one. It leaves out zero values, as
// proto3 does, and keeps its first error for Done.
//
// Bytes that are read share the memory of the message, with no capacity to
// spare, so whoever reads a message gives its bytes away: nobody may change them
// after. Text is copied, the texts of one message into few pieces of memory: a
// short one keeps up to half a KiB of its neighbours alive, and strings.Clone
// frees it of them.
//
// Messages and Writers are for one goroutine.
package wire
