// Streams one answer.
//
//	./generate.sh && go mod tidy && go run . ADDRESS PROMPT
package main

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	pb "example.com/stream/pagodapb"
)

//go:embed pagodapb/service_config.json
var serviceConfig string

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: go run . ADDRESS PROMPT")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := answer(ctx, os.Args[1], os.Args[2]); ctx.Err() != nil {
		os.Exit(130)
	} else if err != nil {
		fmt.Fprintln(os.Stderr, describe(err))
		os.Exit(1)
	}
}

// answer prints text as it comes, then what it cost.
func answer(ctx context.Context, address, prompt string) error {
	conn, err := grpc.NewClient(address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		// gRPC sends a call again, with backoff, that no server took.
		grpc.WithDefaultServiceConfig(serviceConfig))
	if err != nil {
		return err
	}
	defer conn.Close()

	// The deadline travels to the server. To cancel, also by leaving early, frees the request's memory there at once.
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	message := &pb.ChatMessage{Role: "user", Content: prompt}
	spec := &pb.GenerateSpec{
		Prompt: &pb.GenerateSpec_Chat{Chat: &pb.Chat{Messages: []*pb.ChatMessage{message}}},
		Stop:   &pb.StopConditions{MaxTokens: proto.Uint32(64)},
	}
	call, err := pb.NewInferenceServiceClient(conn).GenerateStream(ctx, &pb.GenerateStreamRequest{Spec: spec})
	if err != nil {
		return err
	}
	for {
		response, err := call.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		switch event := response.Event.(type) {
		case *pb.GenerateStreamResponse_Delta:
			fmt.Print(event.Delta.Text)
		case *pb.GenerateStreamResponse_Usage:
			usage := event.Usage
			fmt.Printf("\n%d prompt tokens, %d completion tokens\n", usage.PromptTokens, usage.CompletionTokens)
		}
	}
}
