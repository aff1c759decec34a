"""Says hello every five seconds.

    python examples/hello.py        # Ctrl-C finishes what runs, then ends

The job stays in the cluster: stop the program, and its next run waits until it is back.
"""

from tocsin import Client, Context, Every, Job, Worker

worker = Worker()


@worker.handler
def greet(ctx: Context, name: str) -> str:
    print(f"{ctx.run}, attempt {ctx.attempt}: hello, {name}", flush=True)
    return f"hello, {name}"


JOB = Job(
    name="examples/hello",
    handler="greet",
    schedules=[Every("5s")],
    payload=Job.json(name="world"),
)


if __name__ == "__main__":
    with Client() as client:
        client.apply_job(JOB)  # the same definition again changes nothing
    worker.run()
