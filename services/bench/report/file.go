package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// WriteJSON writes the report as JSON, in lines.
func WriteJSON(out io.Writer, r Report) error {
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(r)
}

// ErrVersion says that a report is of another form than this program reads.
var ErrVersion = errors.New("the report is of another version")

// ReadJSON reads a report that WriteJSON wrote. Members that it does not know are
// passed over: a later program may have added them.
func ReadJSON(in io.Reader) (Report, error) {
	var out Report
	if err := json.NewDecoder(in).Decode(&out); err != nil {
		return Report{}, fmt.Errorf("this is no report: %w", err)
	}
	if out.Version != Version {
		return Report{}, fmt.Errorf("%w: it says %d, and this program reads %d", ErrVersion, out.Version, Version)
	}
	return out, nil
}
