package stagemesh

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/stagemesh/stagemesh/services/bench/plot"
	"github.com/stagemesh/stagemesh/services/bench/report"
)

// outputs are where a report goes, and in which form. Files are made before anything
// is measured.
type outputs struct {
	forms []form
	files []*os.File
}

// form is one form of a report.
type form struct {
	to    io.Writer
	write func(io.Writer, report.Report) error
}

// outputs returns those that the flags name. They are to be closed.
func (f benchFlags) outputs(standard io.Writer) (*outputs, error) {
	out := &outputs{}
	if f.json == "-" {
		out.add(standard, report.WriteJSON)
	} else {
		out.add(standard, report.WriteText)
	}
	if f.json != "-" && f.json != "" {
		if err := out.file("--json", f.json, report.WriteJSON); err != nil {
			return nil, err
		}
	}
	if f.plot != "" {
		if err := out.file("--plot", f.plot, plot.Write); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (o *outputs) add(to io.Writer, write func(io.Writer, report.Report) error) {
	o.forms = append(o.forms, form{to, write})
}

func (o *outputs) file(flag, path string, write func(io.Writer, report.Report) error) error {
	file, err := os.Create(path)
	if err != nil {
		return errors.Join(fmt.Errorf("%s: %w", flag, err), o.close())
	}
	o.files = append(o.files, file)
	o.add(file, write)
	return nil
}

// write writes the report in every form.
func (o *outputs) write(r report.Report) error {
	for _, f := range o.forms {
		if err := f.write(f.to, r); err != nil {
			return err
		}
	}
	return nil
}

// close closes the files.
func (o *outputs) close() error {
	var errs []error
	for _, file := range o.files {
		errs = append(errs, file.Close())
	}
	o.files = nil
	return errors.Join(errs...)
}
