// What graphile-worker does in a comparison: migrate, take jobs in bulk, or work with its fast preset.
//
//     node graphile.mjs migrate CONNECTION
//     node graphile.mjs enqueue CONNECTION COUNT DUE_MS   prints the seconds that it took
//     node graphile.mjs work    CONNECTION NOTES          until SIGTERM; notes each start at its end
import { writeFileSync } from "node:fs";
import { makeWorkerUtils, run, runMigrations } from "graphile-worker";

const [what, connectionString, ...rest] = process.argv.slice(2);
const BATCH = 1000;

async function enqueue(count, dueMs) {
  const utils = await makeWorkerUtils({ connectionString });
  const began = process.hrtime.bigint();
  const runAt = new Date(dueMs);
  for (let from = 0; from < count; from += BATCH) {
    const jobs = Array.from({ length: Math.min(BATCH, count - from) }, (_, at) => ({
      identifier: "noop",
      payload: { id: from + at, due: dueMs },
      runAt,
    }));
    await utils.addJobs(jobs);
  }
  console.log(Number(process.hrtime.bigint() - began) / 1e9);
  await utils.release();
}

async function work(notes) {
  const starts = [];
  const runner = await run({
    connectionString,
    noHandleSignals: true,
    preset: {
      worker: {
        concurrentJobs: 24,
        maxPoolSize: 25,
        localQueue: { size: 500 },
        completeJobBatchDelay: 0,
        failJobBatchDelay: 0,
      },
    },
    taskList: {
      noop: (payload) => {
        starts.push([payload.id, payload.due, Date.now()]);
      },
    },
  });
  console.log("ready");
  process.on("SIGTERM", async () => {
    await runner.stop();
    writeFileSync(notes, JSON.stringify(starts));
    process.exit(0);
  });
}

if (what === "migrate") await runMigrations({ connectionString });
else if (what === "enqueue") await enqueue(Number(rest[0]), Number(rest[1]));
else if (what === "work") await work(rest[0]);
else throw new Error(`no such thing to do: ${what}`);
