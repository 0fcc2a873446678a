package call

import (
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// maxLabels bounds the labels that are remembered: pipelines come and go.
const maxLabels = 4096

// outcome is what an answered request is counted by.
type outcome struct{ pipeline, reason string }

// labels are the options of the instruments that every request is counted by, made once
// for each outcome: a set of attributes is sorted and hashed when it is made.
type labels struct {
	mu   sync.RWMutex
	made map[outcome]*labelled
}

// labelled are the options for one outcome: of the counter, and of the histogram, which
// is by pipeline alone.
type labelled struct {
	requests []metric.AddOption
	duration []metric.RecordOption
}

func (l *labels) of(o outcome) *labelled {
	l.mu.RLock()
	made := l.made[o]
	l.mu.RUnlock()
	if made != nil {
		return made
	}
	return l.make(o)
}

func (l *labels) make(o outcome) *labelled {
	of := attribute.String("pipeline", o.pipeline)
	made := &labelled{
		requests: []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(of, attribute.String("reason", o.reason)))},
		duration: []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(of))},
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.made) >= maxLabels {
		clear(l.made)
	}
	l.made[o] = made
	return made
}
