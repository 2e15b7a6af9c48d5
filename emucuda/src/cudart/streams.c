/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Streams, events, captures and graphs.
 */
#include "runtime.h"

SAME(cudaStreamCreate, (CUstream *out), cuStreamCreateWithPriority(out, 0, 0))
SAME(cudaStreamCreateWithFlags, (CUstream *out, unsigned flags), cuStreamCreateWithPriority(out, flags, 0))
SAME(cudaStreamCreateWithPriority, (CUstream *out, unsigned flags, int priority),
     cuStreamCreateWithPriority(out, flags, priority))
SAME(cudaStreamDestroy, (CUstream stream), cuStreamDestroy(stream))
SAME_RESULTS(cudaStreamSynchronize, (CUstream stream), cuStreamSynchronize(stream))
SAME_RESULTS(cudaStreamQuery, (CUstream stream), cuStreamQuery(stream))
SAME(cudaStreamWaitEvent, (CUstream stream, CUevent e, unsigned flags), cuStreamWaitEvent(stream, e, flags))
SAME(cudaStreamGetPriority, (CUstream stream, int *out), cuStreamGetPriority(stream, out))
SAME(cudaStreamGetFlags, (CUstream stream, unsigned *out), cuStreamGetFlags(stream, out))
SAME(cudaStreamGetId, (CUstream stream, unsigned long long *out), cuStreamGetId(stream, out))
SAME(cudaStreamAddCallback, (CUstream stream, void (*f)(CUstream, CUresult, void *), void *data, unsigned flags),
     cuStreamAddCallback(stream, f, data, flags))
SAME(cudaLaunchHostFunc, (CUstream stream, void (*f)(void *), void *data), cuLaunchHostFunc(stream, f, data))

SAME(cudaEventCreate, (CUevent *out), cuEventCreate(out, 0))
SAME(cudaEventCreateWithFlags, (CUevent *out, unsigned flags), cuEventCreate(out, flags))
SAME(cudaEventDestroy, (CUevent e), cuEventDestroy(e))
SAME(cudaEventRecord, (CUevent e, CUstream stream), cuEventRecordWithFlags(e, stream, 0))
SAME(cudaEventRecordWithFlags, (CUevent e, CUstream stream, unsigned flags), cuEventRecordWithFlags(e, stream, flags))
SAME_RESULTS(cudaEventQuery, (CUevent e), cuEventQuery(e))
SAME_RESULTS(cudaEventSynchronize, (CUevent e), cuEventSynchronize(e))
SAME(cudaEventElapsedTime, (float *ms, CUevent from, CUevent to), cuEventElapsedTime(ms, from, to))

/* ---- captures ---- */

SAME(cudaStreamIsCapturing, (CUstream stream, int *out), cuStreamIsCapturing(stream, out))
SAME(cudaStreamBeginCapture, (CUstream stream, int mode), cuStreamBeginCapture(stream, mode))
SAME(cudaStreamEndCapture, (CUstream stream, CUgraph *out), cuStreamEndCapture(stream, out))
SAME(cudaThreadExchangeStreamCaptureMode, (int *mode), cuThreadExchangeStreamCaptureMode(mode))

#if RUNTIME == 12
SAME(cudaStreamGetCaptureInfo, (CUstream stream, int *status, uint64_t *id),
     cuStreamGetCaptureInfo(stream, status, id, NULL, NULL, NULL, NULL))
SAME(cudaStreamGetCaptureInfo_v2, (CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                   const CUgraphNode **nodes, size_t *count),
     cuStreamGetCaptureInfo(stream, status, id, graph, nodes, NULL, count))
SAME(cudaStreamGetCaptureInfo_v3, (CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                   const CUgraphNode **nodes, const void **edges, size_t *count),
     cuStreamGetCaptureInfo(stream, status, id, graph, nodes, edges, count))
#else
SAME(cudaStreamGetCaptureInfo, (CUstream stream, int *status, uint64_t *id, CUgraph *graph,
                                const CUgraphNode **nodes, const void **edges, size_t *count),
     cuStreamGetCaptureInfo(stream, status, id, graph, nodes, edges, count))
#endif

/* ---- graphs ---- */

SAME(cudaGraphCreate, (CUgraph *out, unsigned flags), cuGraphCreate(out, flags))
SAME(cudaGraphDestroy, (CUgraph graph), cuGraphDestroy(graph))
SAME(cudaGraphClone, (CUgraph *out, CUgraph graph), cuGraphClone(out, graph))
SAME(cudaGraphGetNodes, (CUgraph graph, CUgraphNode *nodes, size_t *count), cuGraphGetNodes(graph, nodes, count))
SAME(cudaGraphNodeGetType, (CUgraphNode node, int *type), cuGraphNodeGetType(node, type))
SAME(cudaGraphAddEmptyNode, (CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count),
     cuGraphAddEmptyNode(out, graph, after, count))
SAME(cudaGraphInstantiate, (CUgraphExec *out, CUgraph graph, unsigned long long flags),
     cuGraphInstantiateWithFlags(out, graph, flags))
SAME(cudaGraphInstantiateWithFlags, (CUgraphExec *out, CUgraph graph, unsigned long long flags),
     cuGraphInstantiateWithFlags(out, graph, flags))
SAME(cudaGraphLaunch, (CUgraphExec run, CUstream stream), cuGraphLaunch(run, stream))
SAME(cudaGraphUpload, (CUgraphExec run, CUstream stream), cuGraphUpload(run, stream))
SAME(cudaGraphExecDestroy, (CUgraphExec run), cuGraphExecDestroy(run))
