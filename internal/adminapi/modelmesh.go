package adminapi

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/stagemesh/stagemesh/proto/gen/go/mmesh"
	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
)

// modelMesh is mmesh.ModelMesh in terms of ModelService: a vmodel is an alias.
type modelMesh struct{ *handler }

// stageKey is the member of a key that names the stage of a model.
const stageKey = "stage"

// modelOf returns the model of a ModelInfo. A key in JSON has its options, and may name its
// stage; else the mesh has one stage that loads models.
func (h modelMesh) modelOf(ctx context.Context, id string, in *mmesh.ModelInfo) (*meshv1.Model, error) {
	out := &meshv1.Model{Id: id, Type: in.GetType(), Source: in.GetPath(), Options: map[string]string{}}
	members := map[string]jsontext.Value{}
	if err := json.Unmarshal([]byte(in.GetKey()), &members); err != nil && in.GetKey() != "" {
		out.Options["key"] = in.GetKey()
	}
	for name, value := range members {
		var text string
		if json.Unmarshal(value, &text) != nil {
			text = string(value)
		}
		out.Options[name] = text
	}
	if out.Stage = out.Options[stageKey]; out.Stage != "" {
		delete(out.Options, stageKey)
		return out, nil
	}
	all, err := h.listHosts(ctx, &adminv1.ListHostsRequest{})
	if err != nil {
		return nil, err
	}
	var stages []string
	for _, one := range all.GetHosts() {
		if one.GetRecord().GetCache() != nil {
			stages = append(stages, one.GetRecord().GetStage())
		}
	}
	switch stages = slices.Compact(slices.Sorted(slices.Values(stages))); len(stages) {
	case 0:
		return nil, fault.New(fault.NoCapacity, "no stage that loads models has a host").WithRetryAfter(retryAfter)
	case 1:
		out.Stage = stages[0]
		return out, nil
	}
	return nil, transport.InvalidField("modelInfo.key", fmt.Errorf(`several stages load models, such as %s and %s; name one, as in {"stage": %q}`, stages[0], stages[1], stages[0]))
}

func timeOf(millis uint64) *timestamppb.Timestamp {
	if millis == 0 {
		return nil
	}
	return timestamppb.New(time.UnixMilli(int64(min(millis, maxMillis))))
}

// maxMillis is the end of the year 9999.
const maxMillis = 253402300799999

func (h modelMesh) registerModel(ctx context.Context, in *mmesh.RegisterModelRequest) (*mmesh.ModelStatusInfo, error) {
	m, err := h.modelOf(ctx, in.GetModelId(), in.GetModelInfo())
	if err != nil {
		return nil, err
	}
	out, err := h.handler.registerModel(ctx, &adminv1.RegisterModelRequest{Model: m, LastUse: timeOf(in.GetLastUsedTime()), LoadNow: in.GetLoadNow(), Wait: in.GetSync()})
	return statusInfo(out.GetModel()), err
}

func (h modelMesh) unregisterModel(ctx context.Context, in *mmesh.UnregisterModelRequest) (*mmesh.UnregisterModelResponse, error) {
	_, err := h.handler.unregisterModel(ctx, &adminv1.UnregisterModelRequest{Id: in.GetModelId()})
	return &mmesh.UnregisterModelResponse{}, err
}

// getModelStatus returns the status of a model, also of one that is not registered.
func (h modelMesh) getModelStatus(ctx context.Context, in *mmesh.GetStatusRequest) (*mmesh.ModelStatusInfo, error) {
	out, err := h.getModel(ctx, &adminv1.GetModelRequest{Id: in.GetModelId()})
	if isUnknown(err) {
		return &mmesh.ModelStatusInfo{Status: mmesh.ModelStatusInfo_NOT_FOUND}, nil
	}
	return statusInfo(out.GetModel()), err
}

// ensureLoaded reports a load that failed or goes on as a status.
func (h modelMesh) ensureLoaded(ctx context.Context, in *mmesh.EnsureLoadedRequest) (*mmesh.ModelStatusInfo, error) {
	id, err := validID("modelId", in.GetModelId())
	if err != nil {
		return nil, err
	}
	lastUse := time.Now()
	if at := timeOf(in.GetLastUsedTime()); at != nil {
		lastUse = at.AsTime()
	}
	err = h.load(ctx, id, in.GetSync(), lastUse)
	if f := fault.From(err); err != nil && f.Reason != fault.ModelLoadFailed && f.Reason != fault.InvalidModel && f.Reason != fault.ModelLoading {
		return nil, f
	}
	return h.getModelStatus(ctx, &mmesh.GetStatusRequest{ModelId: in.GetModelId()})
}

func isUnknown(err error) bool { return fault.From(err).Reason == fault.UnknownModel }

// statusInfo returns the message of a status. The enums have the same numbers, and
// the enum of replicas has no NOT_LOADED.
func statusInfo(in *adminv1.ModelStatus) *mmesh.ModelStatusInfo {
	out := &mmesh.ModelStatusInfo{Status: mmesh.ModelStatusInfo_ModelStatus(in.GetState())}
	latestFirst := slices.SortedFunc(slices.Values(in.GetReplicas()), func(a, b *meshv1.Replica) int { return b.GetSince().AsTime().Compare(a.GetSince().AsTime()) })
	for _, one := range latestFirst {
		out.ModelCopyInfos = append(out.ModelCopyInfos, &mmesh.ModelStatusInfo_ModelCopyInfo{
			Location: one.GetHost(), CopyStatus: mmesh.ModelStatusInfo_ModelStatus(one.GetState() + 1), Time: uint64(max(0, one.GetSince().AsTime().UnixMilli())),
		})
		if one.GetState() == meshv1.ReplicaState_REPLICA_STATE_FAILED {
			out.Errors = append(out.Errors, one.GetHost()+": "+one.GetMessage())
		}
	}
	return out
}

func (h modelMesh) setVModel(ctx context.Context, in *mmesh.SetVModelRequest) (*mmesh.VModelStatusInfo, error) {
	change := &adminv1.SetAliasRequest{
		Name: in.GetVModelId(), Route: &meshv1.AliasRoute{Model: in.GetTargetModelId()}, Owner: in.GetOwner(),
		ExpectModel: in.GetExpectedTargetModelId(), UpdateOnly: in.GetUpdateOnly(),
		Force: in.GetForce(), Wait: in.GetSync(),
	}
	if in.GetModelInfo() != nil {
		var err error
		if change.Register, err = h.modelOf(ctx, in.GetTargetModelId(), in.GetModelInfo()); err != nil {
			return nil, err
		}
		change.AutoDelete = in.GetAutoDeleteTargetModel()
	}
	out, err := h.setAlias(ctx, change)
	if err != nil {
		return nil, err
	}
	if in.GetLoadNow() {
		if _, err := h.ensureLoaded(ctx, &mmesh.EnsureLoadedRequest{ModelId: in.GetTargetModelId(), Sync: in.GetSync()}); err != nil {
			h.Logger.Warn("the target of an alias is not loaded", "alias", in.GetVModelId(), "model", in.GetTargetModelId(), "error", err)
		}
	}
	return h.vModelStatus(ctx, out.GetAlias())
}

// deleteVModel does not distinguish an alias of another owner from none.
func (h modelMesh) deleteVModel(ctx context.Context, in *mmesh.DeleteVModelRequest) (*mmesh.DeleteVModelResponse, error) {
	_, err := h.deleteAlias(ctx, &adminv1.DeleteAliasRequest{Name: in.GetVModelId(), Owner: in.GetOwner()})
	if isUnknown(err) {
		err = nil
	}
	return &mmesh.DeleteVModelResponse{}, err
}

func (h modelMesh) getVModelStatus(ctx context.Context, in *mmesh.GetVModelStatusRequest) (*mmesh.VModelStatusInfo, error) {
	out, err := h.getAlias(ctx, &adminv1.GetAliasRequest{Name: in.GetVModelId(), Owner: in.GetOwner()})
	switch {
	case isUnknown(err):
		return &mmesh.VModelStatusInfo{ActiveModelStatus: &mmesh.ModelStatusInfo{}}, nil
	case err != nil:
		return nil, err
	}
	return h.vModelStatus(ctx, out.GetAlias())
}

func (h modelMesh) vModelStatus(ctx context.Context, a *meshv1.Alias) (out *mmesh.VModelStatusInfo, err error) {
	active := a.GetActive().GetModel()
	out = &mmesh.VModelStatusInfo{
		Status: mmesh.VModelStatusInfo_DEFINED, ActiveModelId: active, TargetModelId: cmp.Or(a.GetTarget().GetModel(), active), Owner: a.GetOwner(),
	}
	if active != "" {
		if out.ActiveModelStatus, err = h.getModelStatus(ctx, &mmesh.GetStatusRequest{ModelId: active}); err != nil {
			return nil, err
		}
	}
	if out.GetTargetModelId() == active {
		return out, nil
	}
	out.Status = mmesh.VModelStatusInfo_TRANSITIONING
	if out.TargetModelStatus, err = h.getModelStatus(ctx, &mmesh.GetStatusRequest{ModelId: out.GetTargetModelId()}); err != nil {
		return nil, err
	}
	if out.GetTargetModelStatus().GetStatus() == mmesh.ModelStatusInfo_LOADING_FAILED {
		out.Status = mmesh.VModelStatusInfo_TRANSITION_FAILED
	}
	return out, nil
}
