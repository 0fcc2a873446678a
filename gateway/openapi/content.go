package openapi

import (
	"bytes"
	"encoding/json"
)

// content is what a body may be, by media type. It is written in this order, for
// viewers offer the first.
type content []media

type media struct {
	contentType string
	object
}

var _ json.Marshaler = content{}

// add adds a media type, unless it is there.
func (c *content) add(contentType string, of object) {
	for _, one := range *c {
		if one.contentType == contentType {
			return
		}
	}
	*c = append(*c, media{contentType, of})
}

// MarshalJSON implements json.Marshaler.
func (c content) MarshalJSON() ([]byte, error) {
	var out bytes.Buffer
	out.WriteByte('{')
	for i, one := range c {
		if i > 0 {
			out.WriteByte(',')
		}
		key, err := json.Marshal(one.contentType)
		if err != nil {
			return nil, err
		}
		value, err := json.Marshal(one.object)
		if err != nil {
			return nil, err
		}
		out.Write(append(append(key, ':'), value...))
	}
	out.WriteByte('}')
	return out.Bytes(), nil
}
