package oip

import (
	"context"
	"math"

	oipv2 "github.com/stagemesh/stagemesh/proto/gen/go/oip/v2"

	"github.com/stagemesh/stagemesh/internal/budget"
	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/sdk/go/tensor"
)

// statisticsBytes is the memory of a model's statistics, as a message and encoded.
const statisticsBytes = 8 << 10

func (s *service) modelStatistics(ctx context.Context, _ *transport.Call, in *oipv2.ModelStatisticsRequest) (*oipv2.ModelStatisticsResponse, error) {
	if err := checkVersion(in.GetName(), in.GetVersion()); err != nil {
		return nil, err
	}
	all, err := s.models.Statistics(ctx, in.GetName())
	if err == nil {
		err = budget.FromContext(ctx).ReserveOutput(int64(len(all)) * statisticsBytes)
	}
	if err != nil {
		return nil, err
	}
	spent := func(s call.Spent) *oipv2.StatisticDuration {
		return &oipv2.StatisticDuration{Count: s.Count, Ns: uint64(s.Total)}
	}
	out := &oipv2.ModelStatisticsResponse{}
	for _, one := range all {
		m := &oipv2.ModelStatistics{
			Name: one.Name, Version: onlyVersion, InferenceCount: one.Rows, ExecutionCount: uint64(math.Ceil(one.Batches - roundingError)),
			InferenceStats: &oipv2.InferStatistics{
				Success: spent(one.Success), Fail: spent(one.Fail), Queue: spent(one.Queue), ComputeInfer: spent(one.Run),
				// They are parts of the run, or do not exist.
				ComputeInput: spent(call.Spent{}), ComputeOutput: spent(call.Spent{}), CacheHit: spent(call.Spent{}), CacheMiss: spent(call.Spent{}),
			},
		}
		if !one.Last.IsZero() {
			m.LastInference = uint64(one.Last.UnixMilli())
		}
		out.ModelStats = append(out.ModelStats, m)
	}
	return out, nil
}

// roundingError is more than the error of a sum of parts of batches.
const roundingError = 1e-6

func (s *service) modelConfig(_ context.Context, _ *transport.Call, in *oipv2.ModelConfigRequest) (*oipv2.ModelConfigResponse, error) {
	model, err := s.model(in.GetName(), in.GetVersion())
	if err != nil {
		return nil, err
	}
	out := &oipv2.ModelConfig{Name: in.GetName(), Platform: platform, Backend: serverName, ModelTransactionPolicy: &oipv2.ModelTransactionPolicy{Decoupled: model.Streams}}
	inputs, outputs := tensorMetadata(model.Inputs), tensorMetadata(model.Outputs)
	hasRows := model.MaxRows > 0 && len(inputs) > 0
	for _, t := range append(inputs[:len(inputs):len(inputs)], outputs...) {
		hasRows = hasRows && len(t.GetShape()) > 0 && t.GetShape()[0] == -1
	}
	dims := (*metadata).GetShape
	if hasRows {
		out.MaxBatchSize = int32(min(model.MaxRows, math.MaxInt32))
		dims = func(t *metadata) []int64 { return t.GetShape()[1:] }
	}
	for i, t := range inputs {
		out.Input = append(out.Input, &oipv2.ModelInput{Name: t.GetName(), DataType: dataType(t), Dims: dims(t), Optional: model.Inputs[i].GetOptional()})
	}
	for _, t := range outputs {
		out.Output = append(out.Output, &oipv2.ModelOutput{Name: t.GetName(), DataType: dataType(t), Dims: dims(t)})
	}
	return &oipv2.ModelConfigResponse{Config: out}, nil
}

func dataType(t *metadata) oipv2.DataType {
	if t.GetDatatype() == string(tensor.Bytes) {
		return oipv2.DataType_TYPE_STRING
	}
	return oipv2.DataType(oipv2.DataType_value["TYPE_"+t.GetDatatype()])
}
