// A client made from the protos alone: creates a job, follows the leader, watches runs.
//
//     node client.js HOST:PORT,HOST:PORT,... PROTO_FOLDER,PROTO_FOLDER,...
//
// It finds the leader by the standard health service: the node that reports `tocsin.leader` as
// SERVING. Each run that it sees succeed is one line of JSON; when its input ends, it deletes the
// job and ends.
'use strict';

const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [addresses, includeDirs] = process.argv.slice(2).map((list) => list.split(','));
const JOB = 'default/from-javascript';
const TRY_MS = 3000;
const PATIENCE_MS = 60000;

const loaded = loader.loadSync(['tocsin/v1/job.proto', 'tocsin/v1/run.proto', 'health.proto'], {
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
  includeDirs,
});
const { tocsin, grpc: standard } = grpc.loadPackageDefinition(loaded);
const nodes = addresses.map((address) => {
  const plain = grpc.credentials.createInsecure();
  return {
    address,
    jobs: new tocsin.v1.JobService(address, plain),
    runs: new tocsin.v1.RunService(address, plain),
    health: new standard.health.v1.Health(address, plain),
  };
});

let leader = null;
let stopping = false;
const say = (what) => process.stdout.write(`${JSON.stringify(what)}\n`);
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// One watch for each node, begun again whenever it breaks.
function followLeader(node) {
  const watch = node.health.Watch({ service: 'tocsin.leader' });
  watch.on('data', ({ status }) => {
    if (status === 'SERVING' && leader !== node) {
      leader = node;
      say({ leader: node.address });
    } else if (status !== 'SERVING' && leader === node) {
      leader = null;
    }
  });
  watch.on('error', () => {});
  watch.on('close', () => {
    if (leader === node) leader = null;
    if (!stopping) setTimeout(() => followLeader(node), 100);
  });
}

async function theLeader() {
  const until = Date.now() + PATIENCE_MS;
  while (leader === null) {
    if (Date.now() > until) throw new Error('no leader');
    await pause(20);
  }
  return leader;
}

// Repeats a change under its request id until it is answered: then it is done once.
async function change(method, request) {
  const until = Date.now() + PATIENCE_MS;
  for (;;) {
    const node = await theLeader();
    try {
      return await new Promise((resolve, reject) => {
        node.jobs[method](request, { deadline: Date.now() + TRY_MS }, (error, answer) =>
          error ? reject(error) : resolve(answer),
        );
      });
    } catch (error) {
      const again = [grpc.status.UNAVAILABLE, grpc.status.UNKNOWN, grpc.status.DEADLINE_EXCEEDED];
      if (!again.includes(error.code) || Date.now() > until) throw error;
      await pause(50);
    }
  }
}

// Goes on at the next leader from the revision that was seen last: nothing is missed.
async function watchRuns() {
  let revision = '0';
  while (!stopping) {
    const node = await theLeader();
    await new Promise((resolve) => {
      const watch = node.runs.WatchRuns({ parent: JOB, from_revision: revision });
      watch.on('data', (message) => {
        if (message.revision !== '0') revision = message.revision;
        for (const run of message.runs) {
          if (run.state === 'RUN_STATE_SUCCEEDED') say({ run: run.name });
        }
      });
      watch.on('error', () => {});
      watch.on('close', resolve);
    });
    await pause(50);
  }
}

async function main() {
  nodes.forEach(followLeader);
  const job = {
    name: JOB,
    handler: 'shell',
    payload: Buffer.from(JSON.stringify({ command: 'true' })),
    schedules: [{ every: { seconds: 1 } }],
    overlap_policy: 'OVERLAP_POLICY_ALLOW',
  };
  const made = await change('CreateJob', { job, request_id: 'made-by-javascript' });
  say({ created: made.job.name });
  watchRuns();
  process.stdin.resume();
  await new Promise((resolve) => process.stdin.on('end', resolve));
  stopping = true;
  await change('DeleteJob', { name: JOB, cancel_active_runs: true, request_id: 'ended' });
  say({ deleted: JOB });
  process.exit(0);
}

main().catch((error) => {
  process.stderr.write(`${error.stack}\n`);
  process.exit(1);
});
