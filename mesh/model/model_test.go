package model_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/stagemesh/stagemesh/mesh/model"
)

func TestIDIsChecked(t *testing.T) {
	t.Parallel()
	for id, valid := range map[model.ID]bool{
		"iris-v1": true, "Ирис/7 öäü": true, model.ID(strings.Repeat("a", model.MaxID)): true,
		"": false, model.ID(strings.Repeat("a", model.MaxID+1)): false, "a\nb": false, "a\x7f": false, "\xff": false,
	} {
		if err := id.Validate(); (err == nil) != valid || err != nil && !errors.Is(err, model.ErrInvalid) {
			t.Errorf("%q: %v", id, err)
		}
	}
}
