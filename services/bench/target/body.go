package target

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"mime/multipart"
	"net/textproto"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
)

// errMixed says that plain HTTP has no body for tensors beside blobs.
var errMixed = fmt.Errorf("payload: tensors beside bytes: %w in http: use grpc or connect", ErrProtocol)

// bodyOf returns inputs as plain HTTP has them: one blob as it is, several as a form,
// tensors as JSON.
func bodyOf(inputs []*inferencev1.Part) (kind string, body []byte, err error) {
	tensors := 0
	for _, part := range inputs {
		if part.GetTensor() != nil {
			tensors++
		}
	}
	switch {
	case tensors == len(inputs):
		body, err = tensorsBody(inputs)
		return "application/json", body, err
	case tensors > 0:
		return "", nil, errMixed
	case len(inputs) == 1 && inputs[0].GetName() == "":
		return inputs[0].GetBlob().GetContentType(), inputs[0].GetBlob().GetData(), nil
	}
	return formBody(inputs)
}

func formBody(inputs []*inferencev1.Part) (kind string, body []byte, err error) {
	var out bytes.Buffer
	form := multipart.NewWriter(&out)
	for _, part := range inputs {
		head := textproto.MIMEHeader{
			"Content-Disposition": {fmt.Sprintf("form-data; name=%q", part.GetName())},
			"Content-Type":        {part.GetBlob().GetContentType()},
		}
		w, err := form.CreatePart(head)
		if err != nil {
			return "", nil, err
		}
		if _, err := w.Write(part.GetBlob().GetData()); err != nil {
			return "", nil, err
		}
	}
	err = form.Close()
	return form.FormDataContentType(), out.Bytes(), err
}

// tensorsBody returns tensors in the JSON of the Open Inference Protocol.
func tensorsBody(inputs []*inferencev1.Part) ([]byte, error) {
	type input struct {
		Name     string  `json:"name"`
		Datatype string  `json:"datatype"`
		Shape    []int64 `json:"shape"`
		Data     any     `json:"data"`
	}
	out := make([]input, len(inputs))
	for i, part := range inputs {
		t := part.GetTensor()
		data, err := elements(t)
		if err != nil {
			return nil, err
		}
		out[i] = input{part.GetName(), t.GetDatatype(), t.GetShape(), data}
	}
	return json.Marshal(map[string]any{"inputs": out})
}

var errNoJSON = errors.New("payload: there is no JSON of such elements: use grpc, connect or oip")
