package transport

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"maps"
	"math"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

const (
	frameHeaderSize = 9
	// maxFrameSize is how long a frame may be, of which no setting says more.
	maxFrameSize = 16 << 10
)

// grpcConn is a connection of a gRPC server. The library reads a message without asking
// whether there is space for it, and keeps a response that nobody takes. So the connection
// follows the frames that are read: it checks the length of each message, reserves the
// budget for its bytes, and looks for streams that stall.
//
// The library reads frame by frame, so the frame that was read last is the one it handles.
type grpcConn struct {
	net.Conn

	settings Settings
	// counted is the connection where the port's connections count, tls its state; nil without.
	counted *countedConn
	tls     *tls.ConnectionState
	in      *bufio.Reader

	// These belong to the goroutine that reads: of the current frame its header with the length
	// of its padding, the unread part of that and of the payload, the padding at its end, its
	// stream, and that again for DATA of an open stream.
	header  [frameHeaderSize + 1]byte
	unread  []byte
	left    int
	padding int
	id      uint32
	current *grpcStream

	// writing is held while the connection is written.
	writing sync.Mutex

	mu      sync.Mutex
	streams map[uint32]*grpcStream
	// probes are how many of them are anonymous.
	probes int
	// resets are streams to reset before the next frame.
	resets []uint32
	// sweep is nil until there is a stream, and sweeping true while it is going to fire.
	sweep            *time.Timer
	sweeping, closed bool
}

var _ credentials.AuthInfo = (*grpcConn)(nil)

func newGRPCConn(conn net.Conn, s Settings) *grpcConn {
	out := &grpcConn{
		Conn: conn, settings: s, counted: countedOf(conn), in: bufio.NewReaderSize(conn, frameHeaderSize+maxFrameSize),
		left: len(http2.ClientPreface), streams: map[uint32]*grpcStream{},
	}
	if secure, ok := conn.(*tls.Conn); ok {
		state := secure.ConnectionState()
		out.tls = &state
	}
	return out
}

// AuthType implements credentials.AuthInfo, by which a call finds its connection.
func (c *grpcConn) AuthType() string { return "stagemesh" }

// Read implements net.Conn. It returns bytes of one frame, and of one message or prefix.
func (c *grpcConn) Read(buf []byte) (int, error) {
	if len(c.unread) == 0 && c.left == 0 {
		if err := c.readHeader(); err != nil {
			return 0, err
		}
	}
	if len(c.unread) > 0 {
		n := copy(buf, c.unread)
		c.unread = c.unread[n:]
		return n, nil
	}
	buf = buf[:min(len(buf), c.left)]
	isData := c.current != nil && c.left > c.padding
	if isData {
		buf = buf[:min(len(buf), c.left-c.padding, c.current.bytesLeft())]
	}
	n, err := c.in.Read(buf)
	for errors.Is(err, os.ErrDeadlineExceeded) && c.hasResets() {
		n, err = c.in.Read(buf)
	}
	c.left -= n
	if isData && n > 0 {
		c.current.follow(buf[:n], c.padding)
	}
	return n, err
}

// readHeader reads the header of the next frame.
func (c *grpcConn) readHeader() error {
	for {
		if id, ok := c.nextReset(); ok {
			// The library resets a stream whose window grows by nothing, which is an error of
			// the client's. It has no function that does.
			var frame bytes.Buffer
			_ = http2.NewFramer(&frame, nil).WriteRawFrame(http2.FrameWindowUpdate, 0, id, make([]byte, 4)) // a buffer takes all
			c.unread = frame.Bytes()
			return nil
		}
		header, err := c.in.Peek(frameHeaderSize)
		if err == nil {
			header, err = c.in.Peek(frameHeaderSize + sizeBeforeHandling(header))
		}
		if err == nil {
			if http2.FrameType(header[3]) != http2.FrameData {
				// The library has no bound on what it is to write for them: a client that
				// takes nothing gets no more read.
				c.writing.Lock()
				c.writing.Unlock() //nolint:staticcheck // it waits
			}
			return c.begin(header)
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || !c.hasResets() {
			return err
		}
	}
}

// sizeBeforeHandling returns how much of a frame has to be there before it is handled, beside its
// header: all settings, or the length of the padding.
func sizeBeforeHandling(header []byte) int {
	size := frameSize(header)
	switch kind := http2.FrameType(header[3]); {
	case kind == http2.FrameSettings:
		return min(size, maxFrameSize)
	case kind == http2.FrameData && http2.Flags(header[4]).Has(http2.FlagDataPadded):
		return min(size, 1)
	}
	return 0
}

func frameSize(header []byte) int { return int(binary.BigEndian.Uint32(header) >> 8) }

var errFrameSize = errors.New("the frame is longer than it may be")

// begin begins a frame with that header, and what sizeBeforeHandling wants.
func (c *grpcConn) begin(header []byte) error {
	c.left, c.padding = frameSize(header), 0
	c.id, c.current = binary.BigEndian.Uint32(header[5:])&(1<<31-1), nil
	if c.left > maxFrameSize {
		// The library closes the connection without a word.
		_ = http2.NewFramer(c, nil).WriteGoAway(math.MaxInt32, http2.ErrCodeFrameSize, nil)
		return errFrameSize
	}
	size, kind := frameHeaderSize, http2.FrameType(header[3])
	switch {
	case kind == http2.FrameSettings:
		boundTable(header[frameHeaderSize:])
	case kind == http2.FrameData && len(header) > frameHeaderSize:
		size++
		c.left--
		c.padding = int(header[frameHeaderSize])
	}
	c.unread = c.header[:copy(c.header[:], header[:size])]
	_, _ = c.in.Discard(size) // it was peeked
	if kind != http2.FrameData || c.padding > c.left {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.current = c.streams[c.id]
	return nil
}

// boundTable bounds the table of fields that the library keeps for a client's answers, which has
// no limit of its own, to the size that it has without a setting.
func boundTable(settings []byte) {
	const size, tableSize = 6, 4 << 10
	for ; len(settings) >= size; settings = settings[size:] {
		if id, value := binary.BigEndian.Uint16(settings), settings[2:size]; http2.SettingID(id) == http2.SettingHeaderTableSize {
			binary.BigEndian.PutUint32(value, min(binary.BigEndian.Uint32(value), tableSize))
		}
	}
}

// Write implements net.Conn. A client that takes nothing for the stall timeout is
// disconnected.
func (c *grpcConn) Write(data []byte) (int, error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	if err := c.SetWriteDeadline(c.stallTime()); err != nil {
		return 0, err
	}
	return c.Conn.Write(data)
}

// open adds the stream whose headers were just read, or returns why there are too many.
func (c *grpcConn) open(s *grpcStream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.isProbe {
		if c.probes >= maxProbeStreams {
			return fault.Newf(fault.Overloaded, "%d calls without a token are open on this connection, as many as may be", c.probes).WithRetryAfter(budget.RetryAfter)
		}
		c.probes++
		s.settings.StallTimeout = min(s.settings.StallTimeout, HandshakeTimeout)
	}
	c.streams[s.id] = s
	if c.sweep == nil {
		c.sweep = time.AfterFunc(c.sweepInterval(), c.endStalled)
	} else if !c.sweeping {
		c.sweep.Reset(c.sweepInterval())
	}
	c.sweeping = true
	return nil
}

// stallTime returns when something that waits from now on has stalled.
func (c *grpcConn) stallTime() time.Time { return time.Now().Add(c.settings.StallTimeout) }

func (s *grpcStream) stallTime() time.Time { return time.Now().Add(s.settings.StallTimeout) }

// sweepInterval is how often the connection looks for stalled streams.
func (c *grpcConn) sweepInterval() time.Duration {
	return min(c.settings.StallTimeout/8, closingInterval)
}

// endStalled ends the streams that stall.
func (c *grpcConn) endStalled() {
	now, closing := time.Now(), IsClosed(c.settings.Closing)
	for _, s := range c.openStreams() {
		s.endStalled(now, closing)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sweeping = len(c.streams) > 0 && !c.closed; c.sweeping {
		c.sweep.Reset(c.sweepInterval())
	}
}

func (c *grpcConn) openStreams() []*grpcStream {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.streams))
}

// reset has the library reset a stream, also one whose handler has returned.
func (c *grpcConn) reset(id uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.resets = append(c.resets, id)
	_ = c.SetReadDeadline(time.Unix(0, 0)) // the reading goroutine waits for the client
}

// hasResets reports whether a read was interrupted for a reset, and lets reads wait again.
func (c *grpcConn) hasResets() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.resets) > 0 {
		_ = c.SetReadDeadline(time.Time{})
	}
	return len(c.resets) > 0
}

func (c *grpcConn) nextReset() (id uint32, ok bool) {
	if !c.hasResets() {
		return 0, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	id, c.resets = c.resets[0], c.resets[1:]
	return id, true
}

// Close implements net.Conn.
func (c *grpcConn) Close() error {
	err := c.Conn.Close()
	c.mu.Lock()
	c.closed = true
	if c.sweep != nil {
		c.sweep.Stop()
	}
	c.mu.Unlock()
	for _, s := range c.openStreams() {
		s.abandonResponses()
	}
	return err
}

// grpcStream is a stream, until its handler has returned and its responses are written.
type grpcStream struct {
	// account is the call's: with its header, the messages that were read, and what is not
	// written.
	account *budget.Account

	conn     *grpcConn
	id       uint32
	header   GRPCHeader
	settings Settings
	isProbe  bool
	// isStandard is true for reflection, whose messages the library's own service receives.
	isStandard bool

	// These belong to the goroutine that reads the connection: a prefix that is not
	// complete and what is reserved for it, the part of a message that has not arrived, and
	// whether messages are no longer told apart.
	prefix     []byte
	prefixCost int64
	left       int
	lost       bool

	// begins is called when the handler begins. Until then the end of the call ends the stream.
	begins func() bool

	// These belong to the handler: its form of messages, and where RecvMsg decodes one.
	codec codec
	into  decodable

	mu sync.Mutex
	// failure is why the stream failed, interrupt has the handler answer it, and answer does so
	// at once; both are nil until the handler begins. excess counts the bytes that arrive
	// before the answer.
	failure           *fault.Fault
	interrupt, answer func()
	excess            int64
	// messages are those that the handler has not received.
	messages []arrival
	// While the handler receives, readBy is when the next stallBytes must have arrived, zero
	// if there is no hurry. received counts them.
	readBy   time.Time
	receives bool
	received int
	// unwritten are the bytes of responses, and writeBy is when the next of them must be
	// written.
	unwritten int64
	writeBy   time.Time
	// ended is true when the handler has returned, and abandoned when the connection is
	// closed.
	ended, abandoned bool
}

// pieceCost is what the library takes for a piece of a message beside its bytes: a frame may
// have one.
const pieceCost = 128

// arrival is a message that the handler has not received. size is what is reserved for it.
type arrival struct {
	size         int64
	isCompressed bool
}

// bytesLeft returns how many bytes the current prefix or message still has.
func (s *grpcStream) bytesLeft() int {
	switch {
	case s.lost:
		return math.MaxInt
	case s.left > 0:
		return s.left
	}
	return prefixSize - len(s.prefix)
}

// follow follows bytes that were read, of a frame with so much padding.
func (s *grpcStream) follow(data []byte, padding int) {
	cost := int64(len(data)+padding) + pieceCost
	if end := s.exceed(cost); end != nil {
		end()
	} else if f := s.reserve(data, cost); f != nil {
		s.fail(f)
	}
}

// exceed counts bytes that arrive after the failure, and returns what ends the stream if they are
// too many: the library buffers the rest of a message that it has begun to read.
func (s *grpcStream) exceed(cost int64) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost = s.lost || s.ended || s.failure != nil; s.ended || s.failure == nil {
		return nil
	}
	s.excess += cost
	full := s.isProbe && s.account.Reserve(cost) != nil
	if !full && s.excess <= 2*streamWindow {
		return nil
	}
	s.excess = 0
	if answer := s.answer; answer != nil && s.unwritten == 0 {
		s.answer = nil // once
		return answer
	}
	return func() { s.conn.reset(s.id) } // a status would wait behind responses that nobody takes
}

// reserve reserves the bytes of a message, or checks the length that a prefix declares.
func (s *grpcStream) reserve(data []byte, cost int64) *fault.Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.failure != nil {
		return nil
	}
	if err := s.account.Reserve(cost); err != nil {
		return fault.From(err)
	}
	if s.left > 0 {
		s.left -= len(data)
		s.messages[len(s.messages)-1].size += cost
	} else if s.prefixCost += cost; s.readPrefix(data) {
		if s.isStandard {
			for _, m := range s.messages {
				s.account.Release(m.size)
			}
			s.messages = s.messages[:0]
		}
		size, limit := int64(binary.BigEndian.Uint32(s.prefix[1:])), int64(s.settings.MaxMessageBytes)
		switch {
		case size > limit:
			s.lost = true
			return TooLarge(limit)
		case s.prefix[0]&flagCompressed != 0 && s.settings.Uncompressed:
			s.lost = true
			return notCompressible()
		}
		s.messages = append(s.messages, arrival{s.prefixCost, s.prefix[0]&flagCompressed != 0})
		s.left, s.prefix, s.prefixCost = int(size), s.prefix[:0], 0
	}
	s.received += len(data)
	if s.receives && (s.readBy.IsZero() || s.received >= stallBytes) {
		s.readBy, s.received = s.stallTime(), 0
	}
	return nil
}

// readPrefix reads a part of the prefix of a message, and reports whether that is all of it.
// The library gets it without the flag of compression.
func (s *grpcStream) readPrefix(data []byte) (isAll bool) {
	isFirst := len(s.prefix) == 0
	s.prefix = append(s.prefix, data...)
	if isFirst {
		data[0] &^= flagCompressed
	}
	return len(s.prefix) == prefixSize
}

// fail has the handler answer the stream with a fault, whatever it waits for. The first counts.
func (s *grpcStream) fail(f *fault.Fault) {
	s.mu.Lock()
	if s.failure != nil {
		s.mu.Unlock()
		return
	}
	s.failure = f
	interrupt := s.interrupt
	s.mu.Unlock()
	if interrupt != nil {
		interrupt()
	}
}

// begin begins the handler, or returns why the stream has failed. From then on a failure is
// answered by that function.
func (s *grpcStream) begin(answer func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failure != nil {
		return s.failure
	}
	s.interrupt, s.answer = answer, answer
	return nil
}

// interruptBy has a failure interrupt the handler, or returns why the stream has failed.
func (s *grpcStream) interruptBy(interrupt func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.interrupt = interrupt
	if s.failure != nil {
		return s.failure
	}
	return nil
}

// end is called when the handler has returned, or the call has ended before it. The stream
// lives on until its responses are written.
func (s *grpcStream) end() {
	s.mu.Lock()
	s.ended = true
	s.account.ReleaseAllBut(s.unwritten)
	s.mu.Unlock()
	s.removeIfDone()
}

func (s *grpcStream) removeIfDone() {
	s.mu.Lock()
	isDone := s.ended && s.unwritten == 0
	s.mu.Unlock()
	if !isDone {
		return
	}
	s.account.Close()
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	if s.isProbe && s.conn.streams[s.id] == s {
		s.conn.probes--
	}
	delete(s.conn.streams, s.id)
}

// receive decodes the next message. A caller of many messages may be silent before each.
func (s *grpcStream) receive(ss grpc.ServerStream, isOnly bool) error {
	s.mu.Lock()
	s.receives, s.received, s.readBy = true, 0, time.Time{}
	if isOnly || len(s.messages) > 0 {
		s.readBy = s.stallTime()
	}
	s.mu.Unlock()
	err := ss.RecvMsg(s)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.receives = false
	if err != nil && s.failure != nil {
		return s.failure
	}
	return err
}

// decode decodes a message that the library has read, and releases its bytes.
func (s *grpcStream) decode(data mem.BufferSlice) {
	s.mu.Lock()
	var m arrival
	if len(s.messages) > 0 {
		m, s.messages = s.messages[0], s.messages[1:]
	}
	s.mu.Unlock()
	defer s.account.Release(m.size)
	if !m.isCompressed {
		buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
		defer buf.Free()
		s.into.decode(s.account, s.codec.unmarshal, buf.ReadOnlyData())
		return
	}
	buffer := growingBuffer{limit: int64(s.settings.MaxMessageBytes), account: s.account}
	defer buffer.keep()
	text, err := inflate(data.Reader(), encodingGzip, &buffer)
	if err != nil {
		s.into.fail(err)
		return
	}
	s.into.decode(s.account, s.codec.unmarshal, text)
}

// minBuffer is more than the size below which the library does not return buffers.
const minBuffer = 4 << 10

// send sends a message.
func (s *grpcStream) send(ss grpc.ServerStream, message any) error {
	var data *[]byte
	switch m := message.(type) {
	case *rawMessage:
		data = mem.DefaultBufferPool().Get(max(len(m.data), minBuffer))
		*data = append((*data)[:0], m.data...)
	case proto.Message:
		data = mem.DefaultBufferPool().Get(max(proto.Size(m), minBuffer))
		var err error
		if *data, err = s.codec.marshal((*data)[:0], m); err != nil {
			return err
		}
	default:
		return errNoMessage(message)
	}
	if f := s.reserveResponse(int64(len(*data))); f != nil {
		return f
	}
	// It consists of parts, so that there is progress before its end.
	size, parts := len(*data), max(1, (len(*data)+stallBytes-1)/stallBytes)
	out := make(mem.BufferSlice, parts)
	for i := range out {
		part := (*data)[i*size/parts : (i+1)*size/parts]
		out[i] = mem.NewBuffer(&part, writtenBuffers{s})
	}
	return ss.SendMsg(out)
}

// reserveResponse reserves the bytes of a response until they are written.
func (s *grpcStream) reserveResponse(n int64) *fault.Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.abandoned {
		return nil
	}
	if err := s.account.ReserveOutput(n); err != nil {
		return fault.From(err)
	}
	if s.unwritten == 0 {
		s.writeBy = s.stallTime()
	}
	s.unwritten += n
	return nil
}

// writtenBuffers is where the library returns the buffers of responses that it has written
// or dropped.
type writtenBuffers struct{ *grpcStream }

// Get implements mem.BufferPool.
func (w writtenBuffers) Get(n int) *[]byte { return mem.DefaultBufferPool().Get(n) }

// Put implements mem.BufferPool.
func (w writtenBuffers) Put(data *[]byte) {
	n, s := int64(len(*data)), w.grpcStream
	if n < stallBytes/2 { // others may be a part of one
		mem.DefaultBufferPool().Put(data)
	}
	s.mu.Lock()
	if !s.abandoned {
		s.unwritten -= n
		s.account.Release(n)
		s.writeBy = s.stallTime()
	}
	s.mu.Unlock()
	s.removeIfDone()
}

// abandonResponses is called when the connection is closed: the library does not return all
// buffers then.
func (s *grpcStream) abandonResponses() {
	s.mu.Lock()
	s.unwritten, s.abandoned = 0, true
	s.mu.Unlock()
	s.removeIfDone()
}

// endStalled ends the stream if it stalls, or if it waits for a message that the gateway
// does not await any longer.
func (s *grpcStream) endStalled(now time.Time, closing bool) {
	s.mu.Lock()
	reads := s.receives && !s.readBy.IsZero()
	stalled := reads && now.After(s.readBy)
	unread := s.unwritten > 0 && !s.writeBy.IsZero() && now.After(s.writeBy)
	if unread {
		s.writeBy = time.Time{} // once
	}
	s.mu.Unlock()
	switch {
	case unread:
		s.conn.reset(s.id)
	case stalled:
		s.fail(Stalled(s.settings.StallTimeout))
	case reads && closing:
		s.fail(stopping())
	}
}
