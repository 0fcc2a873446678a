package fronttest

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"net/url"
	"sort"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"
	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"

	"github.com/stagemesh/stagemesh/internal/front/openai"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// front is one way to call the mesh, in bytes of HTTP.
type front struct {
	name, path, contentType string
	// body returns a request that has the data as an input, and one more header.
	body func(data string) (body, header, value string)
	// envelope is true if a prefix with its length precedes each message.
	envelope bool
	// encoding is the header that names a compression; empty if there is none.
	encoding string
	// outcome returns the failure of an answer, nil if it is none, or an error if it breaks the
	// protocol.
	outcome func(answer) (*fault.Fault, error)
	streams bool
	// many is true for a body of many requests, whose failures are each in the answer.
	many bool
	// stores is true for a front of files and batches, which runs no pipeline.
	stores bool
	// http1 and http2 are the protocols that carry it, native is true where grpc-go serves it too.
	http1, http2, native bool
}

// answer is a response, read whole.
type answer struct {
	status          int
	header, trailer http.Header
	body            string
}

const (
	inferPath       = "/stagemesh.inference.v1.InferenceService/Infer"
	inferStreamPath = "/stagemesh.inference.v1.InferenceService/InferStream"
	oipPath         = "/inference.GRPCInferenceService/"
)

// fronts are all ways to run a pipeline, and to store what batches run.
var fronts = []front{
	{name: "HTTP", path: "/v1/pipelines/p:infer", contentType: "image/png", body: asIs, outcome: restFault, http1: true, http2: true},
	{name: "form", path: "/v1/pipelines/p:infer", contentType: "multipart/form-data; boundary=b", body: inForm, outcome: restFault, http1: true, http2: true},
	{name: "JSON", path: "/v1/pipelines/p:infer", contentType: "application/json", body: inTensor, outcome: restFault, http1: true},
	{name: "MessagePack", path: "/v1/pipelines/p:infer", contentType: "application/msgpack", body: inPack, outcome: restFault, http1: true},
	{name: "lines", path: "/v1/pipelines/p:many", contentType: "application/x-ndjson", body: inTensor, outcome: lineFault, many: true, http1: true, http2: true},
	{name: "events", path: "/v1/pipelines/p:stream", contentType: "text/plain", body: asIs, outcome: restFault, streams: true, http1: true, http2: true},
	{name: "Connect", path: inferPath, contentType: "application/proto", body: inProto, encoding: "Content-Encoding", outcome: connectFault, http1: true, http2: true},
	{name: "Connect JSON", path: inferPath, contentType: "application/json", body: inProtoJSON, encoding: "Content-Encoding", outcome: connectFault, http1: true},
	{name: "Connect stream", path: inferStreamPath, contentType: "application/connect+proto", body: inProto, envelope: true, encoding: "Connect-Content-Encoding", outcome: connectFault, streams: true, http1: true, http2: true},
	{name: "Connect stream JSON", path: inferStreamPath, contentType: "application/connect+json", body: inProtoJSON, envelope: true, encoding: "Connect-Content-Encoding", outcome: connectFault, streams: true, http1: true},
	{name: "gRPC", path: inferPath, contentType: "application/grpc", body: inProto, envelope: true, encoding: "Grpc-Encoding", outcome: grpcFault, http2: true, native: true},
	{name: "gRPC JSON", path: inferPath, contentType: "application/grpc+json", body: inProtoJSON, envelope: true, encoding: "Grpc-Encoding", outcome: grpcFault, http2: true, native: true},
	{name: "gRPC stream", path: inferStreamPath, contentType: "application/grpc+proto", body: inProto, envelope: true, encoding: "Grpc-Encoding", outcome: grpcFault, streams: true, http2: true, native: true},
	{name: "gRPC-Web", path: inferPath, contentType: "application/grpc-web+proto", body: inProto, envelope: true, encoding: "Grpc-Encoding", outcome: grpcFault, http1: true, http2: true},
	{name: "gRPC-Web stream", path: inferStreamPath, contentType: "application/grpc-web+proto", body: inProto, envelope: true, encoding: "Grpc-Encoding", outcome: grpcFault, streams: true, http1: true, http2: true},
	{name: "OIP", path: "/v2/models/p/infer", contentType: "application/json", body: inTensor, encoding: "Content-Encoding", outcome: oipFault, http1: true, http2: true},
	{name: "OIP binary", path: "/v2/models/p/infer", contentType: "application/octet-stream", body: afterJSON, outcome: oipFault, http1: true},
	{name: "OIP generate", path: "/v2/models/p/generate", contentType: "application/json", body: inText, encoding: "Content-Encoding", outcome: oipFault, http1: true, http2: true},
	{name: "OIP generate_stream", path: "/v2/models/p/generate_stream", contentType: "application/json", body: inText, encoding: "Content-Encoding", outcome: oipFault, streams: true, http1: true, http2: true},
	{name: "OIP gRPC", path: oipPath + "ModelInfer", contentType: "application/grpc", body: inModelInfer, envelope: true, encoding: "Grpc-Encoding", outcome: grpcFault, http2: true, native: true},
	{name: "OIP gRPC stream", path: oipPath + "ModelStreamInfer", contentType: "application/grpc", body: inModelInfer, envelope: true, encoding: "Grpc-Encoding", outcome: oipStreamFault, streams: true, http2: true, native: true},
	{name: "chat", path: openai.ChatPath, contentType: "application/json", body: inChat, outcome: openaiFault, http1: true, http2: true},
	{name: "chat stream", path: openai.ChatPath, contentType: "application/json", body: inChatStream, outcome: openaiFault, streams: true, http1: true, http2: true},
	{name: "files", path: openai.FilesPath, contentType: "multipart/form-data; boundary=b", body: inFile, outcome: openaiFault, stores: true, http1: true, http2: true},
	{name: "batches", path: openai.BatchesPath, contentType: "application/json", body: inBatch, outcome: openaiFault, stores: true, http1: true, http2: true},
}

func asIs(data string) (body, header, value string) { return data, "", "" }

func inForm(data string) (body, header, value string) {
	return "--b\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\n" + data + "\r\n--b--\r\n", "", ""
}

func inFile(data string) (body, header, value string) {
	return "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\n" + data + "\r\n--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b--\r\n", "", ""
}

func inBatch(data string) (body, header, value string) {
	return `{"endpoint":"/v1/x","completion_window":"24h","input_file_id":"` + data + `"}`, "", ""
}

func inChat(data string) (body, header, value string) {
	return `{"model":"p","messages":[{"role":"user","content":"` + data + `"}]}`, "", ""
}

func inChatStream(data string) (body, header, value string) {
	return `{"model":"p","stream":true,"messages":[{"role":"user","content":"` + data + `"}]}`, "", ""
}

func inTensor(data string) (body, header, value string) {
	return `{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["` + data + `"]}]}`, "", ""
}

func inText(data string) (body, header, value string) { return `{"text_input":"` + data + `"}`, "", "" }

func inPack(data string) (body, header, value string) {
	return string(binary.BigEndian.AppendUint32([]byte{0xc6}, uint32(len(data)))) + data, "", ""
}

func afterJSON(data string) (body, header, value string) {
	head := fmt.Sprintf(`{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":%d}}]}`, 4+len(data))
	return head + string(element(data)), "Inference-Header-Content-Length", strconv.Itoa(len(head))
}

// element is an element of a BYTES tensor.
func element(data string) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(data))), data...)
}

func inferRequest(data string) *inferencev1.InferRequest {
	return &inferencev1.InferRequest{Pipeline: "p", Inputs: []*inferencev1.Part{{Name: "x", Body: &inferencev1.Part_Blob{Blob: &inferencev1.Blob{Data: []byte(data)}}}}}
}

func inProto(data string) (body, header, value string) {
	return bodyOf(proto.Marshal(inferRequest(data)))
}

func inProtoJSON(data string) (body, header, value string) {
	return bodyOf(protojson.Marshal(inferRequest(data)))
}

func inModelInfer(data string) (body, header, value string) {
	return bodyOf(proto.Marshal(&oipv2.ModelInferRequest{
		ModelName: "p", RawInputContents: [][]byte{element(data)},
		Inputs: []*oipv2.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "BYTES", Shape: []int64{1}}},
	}))
}

func bodyOf(message []byte, err error) (body, header, value string) {
	if err != nil {
		panic(err) // a message of this package is valid
	}
	return string(message), "", ""
}

// frame returns a message in its envelope, if the front has them.
func (f front) frame(message string, compressed bool) string {
	if !f.envelope {
		return message
	}
	flags := []byte{0}
	if compressed {
		flags[0] = 1
	}
	return string(binary.BigEndian.AppendUint32(flags, uint32(len(message)))) + message
}

func zip(text string) string {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, _ = io.WriteString(w, text)
	_ = w.Close()
	return out.String()
}

// fits returns how long data may be in a message of at most that many bytes.
func (f front) fits(limit int) int {
	return sort.Search(limit+1, func(n int) bool {
		body, _, _ := f.body(strings.Repeat("x", n))
		return len(body) > limit
	}) - 1
}

// checkStatus returns the fault, and an error if the status is not its class's.
func checkStatus(reason, message string, got any, want func(fault.Class) any) (*fault.Fault, error) {
	out := fault.New(fault.Reason(reason), message)
	if want := want(fault.Classify(out.Reason)); got != want {
		return out, fmt.Errorf("%s has the status %v, not %v", reason, got, want)
	}
	return out, nil
}

func httpStatus(c fault.Class) any  { return c.HTTP }
func connectCode(c fault.Class) any { return connect.Code(c.Code).String() }
func grpcCode(c fault.Class) any    { return codes.Code(c.Code) }

func restFault(a answer) (*fault.Fault, error) {
	var out struct {
		Error struct{ Reason, Message string }
	}
	if a.status != http.StatusOK {
		if err := json.Unmarshal([]byte(a.body), &out); err != nil {
			return nil, err
		}
		return checkStatus(out.Error.Reason, out.Error.Message, a.status, httpStatus)
	}
	last, err := a.lastEvent()
	if err != nil || last.Name != "error" {
		return nil, err
	}
	err = json.Unmarshal([]byte(last.Data), &out)
	return fault.New(fault.Reason(out.Error.Reason), out.Error.Message), err
}

// lineFault reads the failure of the first line.
func lineFault(a answer) (*fault.Fault, error) {
	if a.status != http.StatusOK {
		return restFault(a)
	}
	var out struct {
		Error struct{ Reason, Message string }
	}
	first, _, _ := strings.Cut(a.body, "\n")
	if err := json.Unmarshal([]byte(first), &out); err != nil || out.Error.Reason == "" {
		return nil, err
	}
	return fault.New(fault.Reason(out.Error.Reason), out.Error.Message), nil
}

func openaiFault(a answer) (*fault.Fault, error) {
	data := a.body
	if a.status == http.StatusOK {
		last, err := a.lastEvent()
		if err != nil || last.Data == "" || last.Data == "[DONE]" {
			return nil, err
		}
		data = last.Data
	}
	var out struct {
		Error struct{ Code, Message string }
	}
	if err := json.Unmarshal([]byte(data), &out); err != nil {
		return nil, err
	}
	reason := strings.ToUpper(out.Error.Code)
	if out.Error.Code == "model_not_found" {
		reason = string(fault.UnknownModel)
	}
	if a.status == http.StatusOK {
		return fault.New(fault.Reason(reason), out.Error.Message), nil
	}
	return checkStatus(reason, out.Error.Message, a.status, httpStatus)
}

func oipFault(a answer) (*fault.Fault, error) {
	data := a.body
	if a.status == http.StatusOK {
		last, err := a.lastEvent()
		if err != nil {
			return nil, err
		}
		data = last.Data
	}
	var out struct{ Error string }
	if err := json.Unmarshal([]byte(data), &out); a.status == http.StatusOK && out.Error == "" {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	reason, message, _ := strings.Cut(out.Error, ": ")
	if a.status == http.StatusOK {
		return fault.New(fault.Reason(reason), message), nil
	}
	return checkStatus(reason, message, a.status, httpStatus)
}

// lastEvent returns the last of an answer of events.
func (a answer) lastEvent() (Event, error) {
	if a.header.Get("Content-Type") != "text/event-stream" {
		return Event{}, nil
	}
	all, err := ReadEvents(strings.NewReader(a.body)).All()
	if err != nil || len(all) == 0 {
		return Event{}, fmt.Errorf("%d events, %w", len(all), err)
	}
	return all[len(all)-1], nil
}

// connectFault reads the error of Connect: the answer, or the last message of a stream.
func connectFault(a answer) (*fault.Fault, error) {
	type failure struct {
		Code, Message string
		Details       []struct{ Debug struct{ Reason string } }
	}
	var out struct {
		failure

		Error *failure
	}
	data := a.body
	if flags, last := a.lastMessage(); strings.HasPrefix(a.header.Get("Content-Type"), "application/connect+") && flags&2 != 0 {
		data = last
	} else if a.status == http.StatusOK {
		return nil, nil
	}
	if err := json.Unmarshal([]byte(data), &out); err != nil {
		return nil, err
	}
	if out.Error != nil {
		out.failure = *out.Error
	}
	switch {
	case out.Code == "" && a.status == http.StatusOK:
		return nil, nil
	case len(out.Details) == 0:
		return nil, fmt.Errorf("%s has no details", data)
	}
	return checkStatus(out.Details[0].Debug.Reason, out.Message, out.Code, connectCode)
}

// lastMessage returns the last message in an envelope, and its flags.
func (a answer) lastMessage() (flags byte, message string) {
	for data := a.body; len(data) >= 5; {
		size := binary.BigEndian.Uint32([]byte(data[1:5]))
		if uint32(len(data)-5) < size {
			return 0, ""
		}
		flags, message, data = data[0], data[5:5+size], data[5+size:]
	}
	return flags, message
}

// oipStreamFault reads the status of gRPC, and the error of the last message.
func oipStreamFault(a answer) (*fault.Fault, error) {
	if f, err := grpcFault(a); f != nil || err != nil {
		return f, err
	}
	var out oipv2.ModelStreamInferResponse
	flags, last := a.lastMessage()
	if flags == 1 {
		unzipped, err := gzip.NewReader(strings.NewReader(last))
		if err != nil {
			return nil, err
		}
		data, err := io.ReadAll(unzipped)
		if err != nil {
			return nil, err
		}
		last = string(data)
	}
	if err := proto.Unmarshal([]byte(last), &out); err != nil || out.GetErrorMessage() == "" {
		return nil, err
	}
	reason, message, _ := strings.Cut(out.GetErrorMessage(), ": ")
	return fault.New(fault.Reason(reason), message), nil
}

// grpcFault reads the status of gRPC: of the trailers, of the headers if there is no message, or
// of gRPC-Web's last message.
func grpcFault(a answer) (*fault.Fault, error) {
	trailer := a.trailer
	flags, last := a.lastMessage()
	if flags&0x80 != 0 {
		trailer = http.Header{}
		for line := range strings.Lines(last) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
			trailer.Set(textproto.CanonicalMIMEHeaderKey(name), strings.TrimSpace(value))
		}
	}
	get := func(name string) string { return a.header.Get(name) + trailer.Get(name) }
	code, err := strconv.Atoi(get("Grpc-Status"))
	if err != nil {
		return nil, fmt.Errorf("HTTP %d without a status of gRPC: %w", a.status, err)
	}
	if code == 0 {
		return nil, nil
	}
	message, err := url.PathUnescape(get("Grpc-Message"))
	if err != nil {
		return nil, err
	}
	data, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(get("Grpc-Status-Details-Bin"), "="))
	if err != nil {
		return nil, err
	}
	var status rpcstatus.Status
	var info errdetails.ErrorInfo
	if err := proto.Unmarshal(data, &status); err != nil || len(status.GetDetails()) == 0 {
		return nil, fmt.Errorf("%d %s has no details: %w", code, message, err)
	}
	if err := status.GetDetails()[0].UnmarshalTo(&info); err != nil {
		return nil, err
	}
	return checkStatus(info.GetReason(), message, codes.Code(code), grpcCode)
}
