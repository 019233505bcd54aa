// What GitOps tools say of objects: Argo CD by its Lua health check, Flux by kstatus. The objects come as a JSON
// array on stdin, the verdicts go out as one, in the same order:
//
//	verdicts argo health.lua <objects.json
//	verdicts kstatus <objects.json
//
// Flux calls the very function of kstatus that is called here. Argo CD runs a check in gopher-lua with the
// libraries opened below and a second's time (its util/lua); there is no string library in it.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	luajson "layeh.com/gopher-json"
)

type verdict struct {
	Status  string `json:"status"`
	Message string `json:"message"`
}

func kstatus(object []byte) (verdict, error) {
	decoded := &unstructured.Unstructured{}
	if err := decoded.UnmarshalJSON(object); err != nil {
		return verdict{}, err
	}
	result, err := status.Compute(decoded)
	if err != nil {
		return verdict{}, err
	}
	return verdict{string(result.Status), result.Message}, nil
}

func argo(script string) func([]byte) (verdict, error) {
	return func(object []byte) (verdict, error) {
		state := lua.NewState(lua.Options{SkipOpenLibs: true})
		defer state.Close()
		for name, open := range map[string]lua.LGFunction{
			lua.LoadLibName: lua.OpenPackage, lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable,
		} {
			if err := state.CallByParam(lua.P{Fn: state.NewFunction(open), Protect: true}, lua.LString(name)); err != nil {
				return verdict{}, err
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		state.SetContext(ctx)
		decoded, err := luajson.Decode(state, object)
		if err != nil {
			return verdict{}, err
		}
		state.SetGlobal("obj", decoded)
		if err := state.DoString(script); err != nil {
			return verdict{}, err
		}
		returned := state.Get(-1)
		if returned.Type() != lua.LTTable {
			return verdict{}, fmt.Errorf("the check returned %s, not a table", returned.Type())
		}
		text, err := luajson.Encode(returned)
		if err != nil {
			return verdict{}, err
		}
		var said verdict
		return said, json.Unmarshal(text, &said)
	}
}

func run() error {
	judge := kstatus
	switch {
	case len(os.Args) == 3 && os.Args[1] == "argo":
		script, err := os.ReadFile(os.Args[2])
		if err != nil {
			return err
		}
		judge = argo(string(script))
	case len(os.Args) != 2 || os.Args[1] != "kstatus":
		return fmt.Errorf("usage: verdicts argo health.lua | verdicts kstatus")
	}
	var objects []json.RawMessage
	if err := json.NewDecoder(os.Stdin).Decode(&objects); err != nil {
		return err
	}
	verdicts := make([]verdict, 0, len(objects))
	for _, object := range objects {
		said, err := judge(object)
		if err != nil {
			return err
		}
		verdicts = append(verdicts, said)
	}
	return json.NewEncoder(os.Stdout).Encode(verdicts)
}

func main() {
	log.SetFlags(0)
	if err := run(); err != nil {
		log.Fatal("verdicts: ", err)
	}
}
