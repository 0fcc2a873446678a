package port_test

import (
	"testing"

	"github.com/stagemesh/stagemesh/internal/testbed"
)

func TestMain(m *testing.M) { testbed.Tests{Parallel: 16}.Main(m) }
